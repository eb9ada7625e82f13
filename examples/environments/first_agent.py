import paddock


class SecondChance(paddock.Environment):
    max_turns, inline = 2, True

    def reset(self, row, seed):
        a, b = 10 + seed % 90, 10 + seed // 90 % 90
        self.question, self.truth = f"{a}+{b}=", str(a + b)[::-1]
        return self.question

    def step(self, answer):
        if answer.text.strip() == self.truth:
            return paddock.Turn(reward=1.0 - 0.5 * answer.number, done=True)
        return self.question


if __name__ == "__main__":
    with paddock.Run(environment=SecondChance, response_length=20, steps=10) as run:
        print(run.train())
