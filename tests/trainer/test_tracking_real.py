"""The loggers of others, as their packages really are: a run is logged through our adapter without a network, resumed
in a second process, and read back with the package's own reader. `make test-loggers` installs the packages.

This file is also the program of those processes: `python test_tracking_real.py write|read <package> <folder> ...`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import signal
import socketserver
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")
PROJECT = "real_loggers"
ACCURACY, LOSS, NORM = "val-core/sums/acc/mean@8", "actor/pg_loss", "actor/grad_norm"

FIRST = {
    0: {ACCURACY: 0.25},
    1: {LOSS: -0.125, NORM: 1.5},
    2: {LOSS: 0.0625, NORM: math.nan},
    3: {LOSS: 0.5, NORM: 0.75, ACCURACY: 0.375},
}
RESUMED_AT = 2
SECOND = {3: {LOSS: 0.53125, NORM: 0.5, ACCURACY: 0.4375}, 4: {LOSS: -1.0, NORM: 0.25}}
ANSWERS = (("2 + 2 = [bold]\nplease", "4", 1.0), ("1 + 1 =", "three", 0.0))


@dataclass
class Found:
    """What a reader finds, in one form for all of them."""

    runs: list[str] = field(default_factory=list)
    """Their ids: one, if the second process went on in the run of the first."""
    values: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of each metric by step; the one written last, where there are several."""
    answers: dict[str, list[list[Any]]] = field(default_factory=dict)
    """Prompt, answer and score of the shown samples by step."""

    def add(self, name: str, step: int, value: float) -> None:
        self.values.setdefault(name, {})[str(step)] = value


# the processes


def write(package: str, folder: str, state: str, resumed: str) -> dict[str, Any]:
    """Logs FIRST, or SECOND after the checkpoint of step `resumed`; what the run would keep in a checkpoint."""
    from dataclasses import asdict

    from paddock.loading.load import load
    from paddock.runs.samples import Sample
    from paddock.runs.tracking import Tracker

    outside = watch_connections()
    keys = [f"trainer.default_local_dir={folder}", f"trainer.logger=[{package}]", f"trainer.project_name={PROJECT}"]
    config = load([*keys, "trainer.experiment_name=sums", "trainer.log_val_generations=2"]).config
    samples = [Sample(prompt, answer, score, 1, 0, ground_truth="4") for prompt, answer, score in ANSWERS]
    step = int(resumed) if resumed else None
    with Tracker(config.trainer, asdict(config), total_steps=4, resumed=step, state=json.loads(state)) as tracker:
        for number, metrics in (FIRST if step is None else SECOND).items():
            tracker.log(number, metrics)
            if ACCURACY in metrics:
                tracker.generations(number, samples)
        kept = tracker.state_dict()
    return {"state": kept, "failed": sorted(tracker.failed), "outside": outside}


def watch_connections() -> list[str]:
    """Everything this process connects to beyond the machine. A package's own child processes are seen by `Watch`."""
    seen: list[str] = []

    def look(event: str, arguments: tuple) -> None:
        if event == "socket.connect" and isinstance(arguments[1], tuple):
            host = str(arguments[1][0])
            if not host.startswith("127.") and host not in ("localhost", "::1"):
                seen.append(host)

    sys.addaudithook(look)
    return seen


def read_tensorboard(folder: Path) -> Found:
    accumulation = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulation.EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    found = Found()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert str(event.step) not in found.values.get(name, {}), f"{name} has step {event.step} twice"
            found.add(name, event.step, event.value)
    shown = "val/generations/text_summary"
    for event in events.Tensors(shown) if shown in events.Tags()["tensors"] else ():
        text = event.tensor_proto.string_val[0].decode()
        parts = [part.split("```") for part in text.split("\n\n---\n\n")]
        found.answers[str(event.step)] = [[p[1].strip("\n"), p[3].strip("\n"), float(p[0].strip("*\n"))] for p in parts]
    return found


def read_wandb(folder: Path) -> Found:
    """Its transaction log: LevelDB's framing (blocks of 32 KiB, 7 bytes before a fragment) around wandb's own messages.
    The package reads it only in its Go program, on the way to a server."""
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    found = Found()
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        for record in map(messages.Record.FromString, framed(path.read_bytes())):
            if record.WhichOneof("record_type") == "run":
                assert (record.run.project, record.run.display_name) == (PROJECT, "sums")
                found.runs.append(record.run.run_id)
            items = {"/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for name in [name for name in items if name in (ACCURACY, LOSS, NORM)]:
                found.add(name, items["_step"], items[name])
            if table := items.get("val/generations/path"):
                content = json.loads((path.parent / "files" / table).read_text())
                assert content["columns"] == ["step", "prompt", "answer", "score", "ground_truth"]
                found.answers[str(items["_step"])] = [row[1:4] for row in content["data"]]
    return found


def framed(data: bytes) -> Iterator[bytes]:
    block, at, whole = 32768, 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # all of a message, or its last fragment
            yield whole
            whole = b""


def read_mlflow(folder: Path) -> Found:
    mlflow = importlib.import_module("mlflow")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name(PROJECT)
    found = Found()
    for run in client.search_runs([experiment.experiment_id]):
        assert (run.info.run_name, run.info.status) == ("sums", "FINISHED")
        found.runs.append(run.info.run_id)
        for name in run.data.metrics:
            for metric in client.get_metric_history(run.info.run_id, name):
                found.add(name.replace("_at_", "@"), metric.step, metric.value)
        for file in client.list_artifacts(run.info.run_id, "generations"):
            rows = mlflow.artifacts.load_dict(f"runs:/{run.info.run_id}/{file.path}")
            found.answers[Path(file.path).stem] = [[row["prompt"], row["answer"], row["score"]] for row in rows]
        settings = mlflow.artifacts.load_dict(f"runs:/{run.info.run_id}/config.json")
        assert settings["trainer"]["project_name"] == PROJECT
    return found


def read_swanlab(folder: Path) -> Found:
    store = importlib.import_module("swanlab.sdk.internal.core_python.store")
    messages = importlib.import_module("swanlab.proto.swanlab.record.v1.record_pb2")
    found = Found()
    for path in sorted((folder / "swanlab").glob("run-*/*.swanlab")):
        reader = store.DataStoreReader()
        reader.open(str(path))
        for record in map(messages.Record.FromString, reader):
            if record.HasField("start"):
                assert (record.start.project, record.start.name) == (PROJECT, "sums")
                found.runs.append(record.start.id)
            if record.HasField("scalar"):
                found.add(record.scalar.key, record.scalar.step, record.scalar.value.number)
            if record.HasField("media") and record.media.key == "val/generations":
                items = record.media.value.items
                texts = [(path.parent / "media" / "text" / item.filename).read_text() for item in items]
                found.answers[str(record.media.step)] = [
                    [*text.split("\n---\n"), float(item.caption.removeprefix("score "))]
                    for text, item in zip(texts, items, strict=True)
                ]
    return found


def read_trackio(folder: Path) -> Found:
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    found = Found(runs=storage.get_runs(PROJECT))
    for run in found.runs:
        assert storage.get_run_config(PROJECT, run)["trainer"]["project_name"] == PROJECT
        for row in storage.get_logs(PROJECT, run):
            for name in [name for name in row if name in (ACCURACY, LOSS, NORM)]:
                found.add(name, row["step"], float(row[name]))
            if table := row.get("val/generations"):
                rows = table["_value"]
                found.answers[str(row["step"])] = [[row["prompt"], row["answer"], row["score"]] for row in rows]
    return found


# the tests


class Watch(socketserver.ThreadingTCPServer):
    """A proxy that lets nothing through and remembers who asked. Go, requests and httpx all go by it."""

    daemon_threads = True

    def __init__(self) -> None:
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), Refusal)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Refusal(socketserver.StreamRequestHandler):
    server: Watch

    def handle(self) -> None:
        self.server.asked.append(self.rfile.readline().decode(errors="replace").strip())
        self.wfile.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")


@dataclass
class Place:
    """A folder, and the surroundings that make every package write into it and nowhere else."""

    folder: Path
    watch: Watch

    @property
    def surroundings(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.lower().startswith(("xdg_", "hf_"))}
        proxy = f"http://127.0.0.1:{self.watch.server_address[1]}"
        proxies = {name: proxy for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY")}
        return {
            **kept,
            **proxies,
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            "HOME": str(self.folder),
            "PYTHONPATH": str(ROOT),
            "WANDB_MODE": "offline",
            "SWANLAB_MODE": "offline",
            "MLFLOW_TRACKING_URI": f"sqlite:///{self.folder}/mlflow.db",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "TRACKIO_DIR": str(self.folder / "trackio"),
        }

    def start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *command],
            env=self.surroundings,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ask(self, *words: str) -> Any:
        """The last line of this file's program, which is what it found."""
        process = self.start(__file__, *words)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, out + err
        return json.loads(out.splitlines()[-1])

    def read(self, package: str) -> Found:
        return Found(**self.ask("read", package, str(self.folder)))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Watch() as watch:
        yield Place(tmp_path, watch)
        watch.shutdown()


@dataclass
class Story:
    found: Found
    first: dict[str, Any]
    second: dict[str, Any]
    asked: list[str]


@pytest.fixture(scope="module")
def stories() -> dict[str, Story]:
    return {}


@pytest.fixture(params=PACKAGES)
def story(request, stories, tmp_path_factory) -> Story:
    """One run of the package in two processes, told once for all tests."""
    package = request.param
    pytest.importorskip(package)
    if package not in stories:
        with Watch() as watch:
            place = Place(tmp_path_factory.mktemp(package), watch)
            first = place.ask("write", package, str(place.folder), "{}", "")
            second = place.ask("write", package, str(place.folder), json.dumps(first["state"]), str(RESUMED_AT))
            stories[package] = Story(place.read(package), first, second, watch.asked)
            watch.shutdown()
    return stories[package]


def same(found: dict[str, float], expected: dict[int, float]) -> bool:
    return found.keys() == {str(step) for step in expected} and all(
        found[str(step)] == value or (math.isnan(value) and math.isnan(found[str(step)]))
        for step, value in expected.items()
    )


def test_every_value_is_read_back(story):
    assert story.first["failed"] == story.second["failed"] == []
    for name in (ACCURACY, LOSS, NORM):
        logged = {step: metrics[name] for step, metrics in (FIRST | SECOND).items() if name in metrics}
        assert same(story.found.values[name], logged), name


def test_a_resumed_run_goes_on_in_the_same_run(story):
    assert story.second["state"] == story.first["state"]
    assert set(story.found.runs) == set(story.first["state"].values())


def test_validation_generations_arrive(story):
    assert story.found.answers == {step: [list(answer) for answer in ANSWERS] for step in ("0", "3")}


def test_nothing_leaves_the_machine(story):
    assert story.first["outside"] == story.second["outside"] == story.asked == []


def test_the_watch_sees_a_request(place):
    script = "import urllib.request as r\ntry: r.urlopen('http://example.org/path')\nexcept OSError: pass\nprint('{}')"
    place.start("-c", script).communicate(timeout=60)
    assert place.watch.asked == ["GET http://example.org/path HTTP/1.1"]


def test_ctrl_c_is_an_orderly_stop_also_beside_loggers_that_catch_it(place):
    """SwanLab puts its own handler on Ctrl-C when it starts; ours must be the one that counts while steps run."""
    loggers = [package for package in PACKAGES if importlib.util.find_spec(package)]
    if not loggers:
        pytest.skip("none of the loggers' packages is installed")
    command = ["-m", "paddock.trainer.main_ppo", "algorithm.adv_estimator=grpo", "trainer.total_training_steps=6",
               "trainer.val_before_train=False", "trainer.test_freq=-1", "data.train_batch_size=8",
               "actor_rollout_ref.rollout.n=2", f"trainer.project_name={PROJECT}", "trainer.experiment_name=sums",
               f"trainer.logger=[console,{','.join(loggers)}]",
               f"trainer.default_local_dir={place.folder}"]  # fmt: skip
    metrics = place.folder / "metrics.jsonl"
    training = place.start(*command)
    deadline = time.monotonic() + 100
    while not (metrics.exists() and metrics.read_text().count("\n")) and time.monotonic() < deadline:
        time.sleep(0.01)
    training.send_signal(signal.SIGINT)
    out, err = training.communicate(timeout=100)
    done = metrics.read_text().count("\n")
    assert "stopping after this step" in err and 1 <= done < 6, out + err
    resumed = place.start(*command)
    out, err = resumed.communicate(timeout=100)
    assert resumed.returncode == 0, out + err
    expected = {str(line["step"]): line[LOSS] for line in map(json.loads, metrics.read_text().splitlines())}
    assert list(expected) == ["1", "2", "3", "4", "5", "6"]
    assert "failed" not in out + err
    for package in loggers:
        found = place.read(package).values[LOSS]
        assert {step: pytest.approx(value, rel=1e-6) for step, value in expected.items()} == found, package


if __name__ == "__main__":
    mode, *words = sys.argv[1:]
    if mode == "write":
        print(json.dumps(write(*words)))
    else:
        readers = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow,
                   "swanlab": read_swanlab, "trackio": read_trackio}  # fmt: skip
        print(json.dumps(asdict(readers[words[0]](Path(words[1])))))
