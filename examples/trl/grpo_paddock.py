import paddock

colours = ["red", "green", "blue", "black", "white", "grey", "pink", "brown", "gold", "teal"]
rows = [{"prompt": f"Name a thing that is {colour}."} for colour in colours]


def twenty_letters(completion: str) -> float:
    return -float(abs(20 - len(completion)))


run = paddock.Run(
    model="builtin:tiny",  # on a GPU, the model of the other program: "Qwen/Qwen2.5-0.5B-Instruct"
    reward=twenty_letters,
    data=rows,
    folder="out",
    lr=5e-4,
    n=8,
    batch=10,
    response_length=32,
    steps=15,
)
run.train()
