"""How long a large file of prompts takes until the first batch, and how much memory, at a first and a second start.

    python benchmarks/data_start.py --rows 1000000

Each start is a process of its own with an empty cache for the first; the prompts are messages, written by a chat
template, for the tokenizer of the built-in model. `anonymous` is memory of the process itself; pages of mapped files,
which the system may drop at any time, are counted in `peak` only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

START = """
import json, resource, sys, time
begin = time.perf_counter()
from paddock.config.schema import DataConfig
from paddock.data.dataset import PromptDataset
from paddock.data.loader import Loader
from paddock.models.load import load_tokenizer
def memory(field):
    text = open("/proc/self/status").read()
    return int(text.split(field + ":")[1].split()[0]) / 1024
tokenizer = load_tokenizer("builtin:tiny", False)
def cpu():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
imported, base, used = time.perf_counter(), memory("RssAnon"), cpu()
config = DataConfig(train_files=sys.argv[1], train_batch_size=64, max_prompt_length=400, seed=0)
data = PromptDataset.train(config, tokenizer)
loader = Loader.train(config, data)
first = loader.next_prompts()
print(json.dumps({
    "imports_s": imported - begin, "start_s": time.perf_counter() - imported, "cpu_s": cpu() - used,
    "rows": len(data), "left_out": data.left_out,
    "anonymous_mib": memory("RssAnon") - base, "peak_mib": memory("VmHWM"),
}))
"""


def record(index: int, draw: random.Random) -> dict[str, object]:
    words = " ".join(draw.choices(["apples", "Natalia", "sold", "each", "week", "how", "many", "27", "half"], k=24))
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{index}: {words}?"}],
        "reward_model": {"style": "rule", "ground_truth": str(index)},
        "extra_info": {"split": "train", "index": index},
    }


def write(folder: Path, kind: str, rows: int) -> Path:
    path, draw = folder / f"rows.{kind}", random.Random(0)
    if kind == "jsonl":
        with path.open("w") as file:
            file.writelines(json.dumps(record(index, draw)) + "\n" for index in range(rows))
        return path
    import pyarrow as pa
    from pyarrow import parquet

    writer = None
    for start in range(0, rows, 50_000):
        table = pa.Table.from_pylist([record(index, draw) for index in range(start, min(start + 50_000, rows))])
        writer = writer or parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()
    return path


def start(path: Path, cache: Path) -> dict[str, float]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run([sys.executable, "-c", START, str(path)], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--kinds", default="jsonl,parquet")
    parser.add_argument("--folder", type=Path, help="keep the files here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for kind in options.kinds.split(","):
            path = folder / f"rows.{kind}"
            path = path if path.is_file() else write(folder, kind, options.rows)
            cache = Path(tempfile.mkdtemp(dir=scratch))
            for name in ("first", "second"):
                found = start(path, cache)
                size = path.stat().st_size / 2**20
                print(json.dumps({"kind": kind, "mib": round(size), "start": name} |
                                 {key: round(value, 1) for key, value in found.items()}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
