"""paddock report RUN [RUN ...] [--out FILE]: the page about one run, or several runs in the same charts."""

from __future__ import annotations

import argparse
from pathlib import Path

from paddock.core.options import Options
from paddock.errors import UserError
from paddock.report.page import NAME, write_page
from paddock.runs.reading import COMMAND, read_run

DESCRIPTION = """\
Writes one self-contained HTML page about one or more run folders: curves, samples, settings, environment.
Several runs are drawn into the same charts; runs that differ only by seed become their mean with a band."""


def run(arguments: list[str]) -> int:
    parser = Options(prog=COMMAND, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder: trainer.default_local_dir")
    parser.add_argument("--out", metavar="FILE", help=f"the page; default: RUN/{NAME}, of several runs ./{NAME}")
    given = parser.parse_args(arguments)
    folders = [Path(name).expanduser() for name in given.runs]
    runs = [read_run(folder) for folder in folders]
    resolved = [run.folder.resolve() for run in runs]
    for folder in resolved:
        if resolved.count(folder) > 1:
            raise UserError("is named twice", key=COMMAND, value=folder, fix="name each run once")
    out = Path(given.out).expanduser() if given.out else (runs[0].folder if len(runs) == 1 else Path()) / NAME
    if out.is_dir():
        raise UserError("is a folder", key="--out", value=out, fix=f"--out {out / NAME}")
    if out.exists() and out.suffix.lower() not in (".html", ".htm"):
        raise UserError("is there already, and is no page", key="--out", value=out, fix=f"--out {NAME}")
    write_page(runs, out, "--out")
    print(f"{out}: {len(runs)} run{'s' if len(runs) > 1 else ''}, {out.stat().st_size / 1000:,.0f} kB")
    return 0
