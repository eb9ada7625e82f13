"""Flags and arguments of a command, by argparse; a mistake in them is answered as every other mistake of a user is."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from paddock.errors import UserError

ABOUT_ONE = re.compile(r"argument (\S+?)(?:/\S+)?: (.*)", re.DOTALL)


class Options(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError in place of printing its usage and ending the process."""

    def __init__(self, **settings: Any):
        super().__init__(**{**settings, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        named = ABOUT_ONE.fullmatch(message)
        key, reason = (named[1], named[2]) if named else (self.prog, message)
        raise UserError(reason, key=key, fix=" ".join(self.format_usage().split()))
