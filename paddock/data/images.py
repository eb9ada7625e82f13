"""Images of rows: where they are, how they are opened, and the places that prompts have for them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

from paddock.core.images import Images
from paddock.data.chat import Messages, PromptEncoder
from paddock.data.reading import Asked
from paddock.data.tables import bad_row

IMAGE = "<image>"
"""Marks an image in the text of a message."""
WHITE = (255, 255, 255)


class ReadsImages(Protocol):
    """Turns pictures into the arrays that a model reads."""

    token: int
    """The token that stands for an image in a prompt."""

    def features(self, height: int, width: int) -> int:
        """Tokens that an image of this size takes."""
        ...

    def read(self, tokens: list[int], pictures: Sequence[Any]) -> tuple[list[int], Images]:
        """Returns a prompt with as many tokens per image as it has features, and its images."""
        ...

    def identity(self) -> bytes: ...

    def save(self, folder: Path) -> None: ...


class ImagePrompts:
    """Prompts whose rows may have images. Without a reader there are none, and texts stay as they are."""

    def __init__(self, encoder: PromptEncoder, reader: ReadsImages | None, prompt: str, images: str):
        """`prompt` and `images` are the names of columns."""
        self.encoder, self.reader = encoder, reader
        self.prompt, self.images = prompt, images

    def encode(self, rows: Sequence[Asked]) -> list[tuple[list[int], Images | None]]:
        """Tokens of each prompt, those of its images included, and its images."""
        found: list[tuple[list[int], Images | None]] = []
        for row, tokens, pictures in zip(rows, *self._tokens(rows), strict=True):
            if self.reader and pictures:
                shown = [opaque(one, row.location, self.images) for one in pictures]
                with readable(row.location, self.images):
                    found.append(self.reader.read(tokens, shown))
            else:
                found.append((tokens, None))
        return found

    def lengths(self, rows: Sequence[Asked]) -> list[int]:
        """Returns how many tokens `encode` would give. An image tells its size without being read."""
        found = []
        for row, tokens, pictures in zip(rows, *self._tokens(rows), strict=True):
            with readable(row.location, self.images):
                more = sum(self.reader.features(one.height, one.width) - 1 for one in pictures if self.reader)
            found.append(len(tokens) + more)
        return found

    def identity(self) -> bytes | None:
        """Equal where every prompt gets equal tokens; None where that cannot be told."""
        known = self.encoder.identity()
        return known + self.reader.identity() if known and self.reader else known

    def save(self, folder: Path) -> None:
        """Saves the tokenizer and the image processor beside the model."""
        self.encoder.tokenizer.save_pretrained(folder)
        if self.reader:
            self.reader.save(folder)

    def _tokens(self, rows: Sequence[Asked]) -> tuple[list[list[int]], list[list[Any]]]:
        """The tokens of each prompt, with one for each image, and its pictures, of which only the head is parsed."""
        pictures = [self._pictures(row) if self.reader else [] for row in rows]
        prompts = [
            self._with_entries(row, len(shown)) if self.reader else row.messages
            for row, shown in zip(rows, pictures, strict=True)
        ]
        tokens = self.encoder.encode(prompts, [row.location for row in rows], self.prompt)
        for row, ids, shown in zip(rows, tokens, pictures, strict=True):
            if self.reader and (written := ids.count(self.reader.token)) != len(shown):
                reason = f"the chat template writes {written} image tokens for {len(shown)} images"
                fix = "use the chat template of a vision-language model, and write no image tokens in texts"
                raise bad_row(row.location, self.prompt, reason, fix)
        return tokens, pictures

    def _pictures(self, row: Asked) -> list[Any]:
        value = row.record.get(self.images) or []
        images = value if isinstance(value, list) else [value]
        return [opened(image, row.location, self.images, row.folder) for image in images]

    def _with_entries(self, row: Asked, images: int) -> Messages:
        """Returns the prompt with an entry for each image, as chat templates want it. A row of a file without a column
        of images may write of "<image>" as of anything else."""
        if isinstance(row.messages, str):
            if images:
                reason = "is a plain text, and how an image is written into it only a chat template knows"
                raise bad_row(
                    row.location, self.prompt, reason, f'messages: [{{"role": "user", "content": "{IMAGE}..."}}]'
                )
            return row.messages
        asked = row.messages
        if self.images in row.record:
            asked = [message | {"content": with_entries(message.get("content"))} for message in asked]
        contents = [message["content"] for message in asked if isinstance(message.get("content"), list)]
        entries = [entry for content in contents for entry in content if isinstance(entry, dict)]
        wanted = sum(entry.get("type") == "image" for entry in entries)
        if wanted != images:
            reason = f"has {images} images, and the prompt {wanted} places for one"
            raise bad_row(row.location, self.images, reason, f"write {IMAGE} once for each image into {self.prompt!r}")
        return asked


def with_entries(content: Any) -> Any:
    """Texts cut where an image stands; content without images stays what it is."""
    if isinstance(content, str):
        return cut(content) if IMAGE in content else content
    if not isinstance(content, list):
        return content
    found: list[Any] = []
    for entry in content:
        text = entry.get("text") if isinstance(entry, dict) else None
        found += cut(text) if isinstance(text, str) and IMAGE in text else [entry]
    return found


def cut(text: str) -> list[dict[str, str]]:
    parts = re.split(f"({IMAGE})", text)
    return [{"type": "image"} if part == IMAGE else {"type": "text", "text": part} for part in parts if part]


@contextmanager
def readable(location: str, column: str) -> Iterator[None]:
    """Processors have limits of their own: a picture 200 times as long as wide, say."""
    try:
        yield
    except ValueError as error:
        raise bad_row(location, column, f"an image cannot be read: {error}", "mend or drop the row") from error


def opened(image: Any, location: str, column: str, folder: Path) -> Any:
    """Opens a picture and parses only its head: bytes, a path beside the data file, or {"bytes": ..., "path": ...}."""
    fix = 'a file\'s bytes, its path, or {"bytes": ..., "path": ...}'
    content = image.get("bytes") if isinstance(image, dict) else image
    name = image.get("path") if isinstance(image, dict) else image
    if isinstance(content, bytes):
        return picture(content, "its bytes", location, column)
    if not isinstance(name, str) or not name:
        raise bad_row(location, column, f"holds {image!r:.80}, not an image", fix)
    file = folder / Path(name).expanduser()
    if not file.is_file():
        raise bad_row(location, column, f"names {name!r}, and there is no {file}", fix)
    try:
        return picture(file.read_bytes(), name, location, column)  # not the file: thousands may be open at a time
    except OSError as error:
        raise bad_row(location, column, f"{name}: {error.strerror}", fix) from error


def picture(content: bytes, name: str, location: str, column: str) -> Any:
    from PIL import Image, UnidentifiedImageError  # whoever has a reader has it

    try:
        return Image.open(BytesIO(content))
    except (UnidentifiedImageError, OSError) as error:
        reason = f"{name} is no image that can be opened: {error}"
        raise bad_row(location, column, reason, "mend or drop the row") from error


def opaque(shown: Any, location: str, column: str) -> Any:
    """Converts the image to RGB; transparent pixels become white."""
    from PIL import Image

    try:
        if not shown.has_transparency_data:
            return shown.convert("RGB")
        paper = Image.new("RGBA", shown.size, WHITE)
        return Image.alpha_composite(paper, shown.convert("RGBA")).convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise bad_row(location, column, f"an image is damaged: {error}", "mend or drop the row") from error
