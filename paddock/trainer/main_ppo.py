"""python -m paddock.trainer.main_ppo key=value ...: `paddock train` under the name that launch scripts of verl use."""

from runpy import run_module

if __name__ == "__main__":
    run_module("paddock.commands.train", run_name="__main__", alter_sys=True)
