"""Writes report.html into a run folder at the end of a run. A page that cannot be written never fails the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from paddock.core.files import replacing
from paddock.report.page import render
from paddock.report.summary import summary_lines
from paddock.runs.reading import RecordedRun, read_run

NAME = "report.html"
log = logging.getLogger(__name__)


def write_page(runs: Sequence[RecordedRun], path: Path, key: str) -> None:
    """Writes the page about these runs; `key` is the setting or option that names its folder."""
    page = render(runs).encode(errors="replace")
    with replacing(path, key) as file:
        file.write(page)


def conclude_run(folder: Path) -> list[str]:
    """Writes a run's page and returns its summary, line by line; after an error no more than can be had."""
    try:
        run = read_run(folder)
        said = summary_lines(run)
    except Exception as error:  # whatever is in the folder: the run itself has ended well
        log.warning("no summary of this run: %s", error)
        return []
    try:
        write_page([run], folder / NAME, "trainer.default_local_dir")
    except Exception as error:
        log.warning("%s was not written: %s", NAME, error)
        return said
    return [*said, f"The report is in {folder / NAME}"]
