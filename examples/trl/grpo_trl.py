from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

colours = ["red", "green", "blue", "black", "white", "grey", "pink", "brown", "gold", "teal"]
rows = [{"prompt": f"Name a thing that is {colour}."} for colour in colours]


def twenty_letters(completions, **columns):
    return [-float(abs(20 - len(text))) for text in completions]


trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=twenty_letters,
    args=GRPOConfig(
        output_dir="out",
        learning_rate=5e-4,
        num_generations=8,
        per_device_train_batch_size=80,
        max_completion_length=32,
        max_steps=15,
    ),
    train_dataset=Dataset.from_list(rows),
)
trainer.train()
