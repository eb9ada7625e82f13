"""Images of rows: places in prompts, files and bytes, lengths with images in them, and the errors people can mend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

pytest.importorskip("PIL", reason="needs the extra `vision`")

from PIL import Image
from tiny_models import byte_tokenizer
from tiny_vision import IMAGE, encoded, painted, reader_of, save_tiny_vision, vision_tokenizer

from paddock.config.schema import DataConfig
from paddock.data.dataset import PromptDataset
from paddock.data.images import opaque, with_entries
from paddock.data.loader import Loader, prompt_batch
from paddock.data.prepare.geometry3k import COLUMNS
from paddock.data.prepare.geometry3k import row as geometry_row
from paddock.data.prepare.records import Record
from paddock.data.prepare.write import arrow_schema
from paddock.data.unscored import AnswerDataset, UnscoredDataset
from paddock.errors import UserError

RED = {"bytes": encoded(painted()), "path": None}
ASK = [{"role": "user", "content": "<image>What is it?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def record(prompt: Any = ASK, **columns: Any) -> dict[str, Any]:
    truth = {"style": "rule", "ground_truth": "red"}
    return {"data_source": "colours", "prompt": prompt, "reward_model": truth, **columns}


def written(tmp_path: Path, *records: dict[str, Any], name: str = "rows.parquet") -> str:
    file = tmp_path / name
    if file.suffix == ".jsonl":
        file.write_text("\n".join(json.dumps(one) for one in records))
    else:
        parquet.write_table(pa.Table.from_pylist(list(records)), file)
    return str(file)


def dataset(file: str, folder: Path | None, kind: type = PromptDataset, **settings: Any) -> PromptDataset:
    tokenizer = vision_tokenizer() if folder else byte_tokenizer()
    reader = reader_of(folder) if folder else None
    return kind(file, tokenizer, DataConfig(**settings), key="data.train_files", reader=reader)


def test_a_row_gets_its_image_tokens_and_its_pixels_once(tmp_path, folder):
    row = dataset(written(tmp_path, record(images=[RED])), folder)[0]
    assert row.tokens.count(IMAGE) == len(row.images.token_index) == 4
    assert [row.tokens[place] for place in row.images.token_index] == [IMAGE] * 4
    assert row.images.pixels.shape == (16, 3 * 2 * 4 * 4) and row.images.grids.tolist() == [[1, 4, 4]]
    assert row.images.positions.shape == (3, len(row.tokens))
    assert row.messages == ASK  # as the file has it: judges and dumps read texts


def test_a_prompt_with_an_image_may_begin_its_answer(tmp_path, folder):
    begun = [*ASK, {"role": "assistant", "content": "It is"}]
    plain, row = dataset(written(tmp_path, record(images=[RED]), record(begun, images=[RED])), folder).rows([0, 1])
    assert (
        row.tokens[: len(plain.tokens)] == plain.tokens
        and row.images.token_index.tolist() == plain.images.token_index.tolist()
    )
    assert vision_tokenizer().decode(row.tokens[len(plain.tokens) :]).strip() == "It is"


def test_all_answers_to_a_prompt_carry_one_object(tmp_path, folder):
    loader = Loader(dataset(written(tmp_path, record(images=[RED]), record(images=[RED])), folder), 2, seed=0)
    batch = prompt_batch(loader.next_prompts(), samples=3, pad_token=0)
    images = batch.extras["images"]
    assert [one is images[0] for one in images] == [True] * 3 + [False] * 3
    again = batch.rows(torch.tensor([5, 2, 0])).rows(torch.tensor([2, 1]))
    assert all(one is images[0] for one in again.extras["images"])


@pytest.mark.parametrize("where", ["bytes", "path", "absolute", "text", "one"])
def test_an_image_is_bytes_or_a_path_beside_the_file(where, tmp_path, folder):
    (tmp_path / "pictures").mkdir()
    painted().save(tmp_path / "pictures" / "red.png")
    value = {
        "bytes": [RED["bytes"]],
        "path": [{"bytes": None, "path": "pictures/red.png"}],
        "absolute": [{"bytes": None, "path": str(tmp_path / "pictures" / "red.png")}],
        "text": ["pictures/red.png"],
        "one": RED,
    }[where]
    found = dataset(written(tmp_path, record(images=value)), folder)[0].images
    expected = dataset(written(tmp_path, record(images=[RED]), name="other.parquet"), folder)[0].images
    assert torch.equal(found.pixels, expected.pixels)


def test_json_rows_name_image_files(tmp_path, folder):
    painted().save(tmp_path / "red.png")
    rows = written(tmp_path, record(images=["red.png"]), record("no images at all"), name="rows.jsonl")
    first, second = dataset(rows, folder).rows([0, 1])
    assert first.images is not None and second.images is None


def test_places_in_texts_and_entries_of_content_lists_are_the_same(tmp_path, folder):
    entries = [{"type": "image", "text": None}, {"type": "text", "text": "What is it?"}]
    both = [record(images=[RED]), record([{"role": "user", "content": entries}], images=[RED])]
    rows = [dataset(written(tmp_path, one, name=f"{i}.parquet"), folder)[0] for i, one in enumerate(both)]
    assert rows[0].tokens == rows[1].tokens
    assert with_entries("a<image>b<image>") == [
        {"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}, {"type": "image"},
    ]  # fmt: skip


def test_the_order_of_images_is_that_of_their_places(tmp_path, folder):
    wide = {"bytes": encoded(painted(width=32, height=8)), "path": None}
    ask = [{"role": "user", "content": "<image> or "}, {"role": "user", "content": "<image>"}]
    images = dataset(written(tmp_path, record(ask, images=[wide, RED])), folder)[0].images
    assert images.grids.tolist() == [[1, 2, 8], [1, 4, 4]]


def test_what_is_transparent_is_white(tmp_path):
    picture = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert opaque(picture, "row", "images").getpixel((0, 0)) == (255, 255, 255)
    assert opaque(Image.new("L", (8, 8), 7), "row", "images").getpixel((0, 0)) == (7, 7, 7)


# Errors


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (record(images=[RED, RED]), ["column 'images'", "has 2 images, and the prompt 1 places", "write <image> once"]),
        (record([{"role": "user", "content": "none"}], images=[RED]), ["has 1 images, and the prompt 0 places"]),
        (record(images=[]), ["has 0 images, and the prompt 1 places"]),
        (record("plain <image>", images=[RED]), ["column 'prompt'", "plain text", "messages:"]),
        (record(images=[{"bytes": b"not an image", "path": None}]), ["column 'images'", "no image that can be opened"]),
        (record(images=[{"bytes": encoded(painted())[:60], "path": None}]), ["an image is damaged"]),
        (record(images=["absent.png"]), ["column 'images'", "absent.png"]),
        (record(images=[7]), ["holds 7, not an image"]),
        (record([{"role": "user", "content": "<image><|image_pad|>"}], images=[RED]),
         ["writes 2 image tokens for 1 images"]),
        (record(videos=["film.mp4"]), ["column 'videos'", "are not read"]),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_read_is_named_with_file_row_column_and_fix(row, said, tmp_path, folder):
    file = written(tmp_path, row)
    with pytest.raises(UserError) as caught:
        dataset(file, folder, filter_overlong_prompts=False)[0]
    message = str(caught.value)
    assert all(part in message for part in [f"{file} row 0", *said]), message


def test_a_model_without_a_tower_refuses_rows_with_images(tmp_path):
    file = written(tmp_path, record(images=[RED]))
    with pytest.raises(UserError, match="reads none") as caught:
        dataset(file, None)
    assert "column 'images'" in str(caught.value)
    with pytest.raises(UserError, match="reads none"):
        learnt = written(tmp_path, record(images=[RED], answer="red"), name="learnt.parquet")
        AnswerDataset(learnt, byte_tokenizer(), DataConfig(), key="data.train_files")


def test_a_text_may_speak_of_images_where_there_is_no_column_of_them(tmp_path, folder):
    row = dataset(written(tmp_path, record([{"role": "user", "content": "what does <image> mean in html?"}])), folder)[
        0
    ]
    assert row.images is None and "<image>" in vision_tokenizer().decode(row.tokens)


def test_a_template_for_texts_alone_is_refused(tmp_path, folder):
    settings = {"apply_chat_template_kwargs": {"chat_template": "{{ messages[0].role }}"}}
    with pytest.raises(UserError, match="writes 0 image tokens for 1 images"):
        dataset(written(tmp_path, record(images=[RED])), folder, **settings)


@pytest.mark.parametrize("measured", [True, False])
def test_a_picture_that_the_processor_refuses_is_named(measured, tmp_path, folder):
    thin = {"bytes": encoded(painted(width=4000, height=4)), "path": None}
    with pytest.raises(UserError, match="aspect ratio") as caught:
        dataset(written(tmp_path, record(images=[thin])), folder, filter_overlong_prompts=measured)[0]
    assert "row 0, column 'images'" in str(caught.value)


# Lengths


def test_prompts_are_measured_with_their_images_and_left_out_whole(tmp_path, folder):
    large = {"bytes": encoded(painted(width=32, height=32)), "path": None}
    file = written(tmp_path, record(images=[RED]), record(images=[large]))
    short, long = dataset(file, folder).rows([0, 1])
    assert len(long.tokens) == len(short.tokens) + 12
    kept = dataset(file, folder, max_prompt_length=len(long.tokens) - 1)
    assert (len(kept), kept.left_out, kept[0].tokens) == (1, 1, short.tokens)
    assert len(dataset(file, folder, max_prompt_length=len(long.tokens))) == 2


def test_measured_lengths_are_those_of_the_rows(tmp_path, folder):
    sizes = [(8, 8), (40, 20), (11, 60), (200, 200)]
    images = [{"bytes": encoded(painted(width=w, height=h)), "path": None} for w, h in sizes]
    data = dataset(written(tmp_path, *(record(images=[image]) for image in images)), folder)
    assert data.prompts.lengths(data.reading.prompts(range(4))) == [len(row.tokens) for row in data.rows(range(4))]


def test_lengths_are_measured_again_for_other_limits(tmp_path, folder):
    large = {"bytes": encoded(painted(width=32, height=32)), "path": None}
    file, config = written(tmp_path, record(images=[large])), DataConfig(max_prompt_length=40)
    with pytest.raises(UserError, match="is longer"):
        PromptDataset(file, vision_tokenizer(), config, key="data.train_files", reader=reader_of(folder))
    small = reader_of(folder, max_pixels=256)
    assert len(PromptDataset(file, vision_tokenizer(), config, key="data.train_files", reader=small)) == 1


@pytest.mark.parametrize("how", ["error", "left", "right", "middle"])
def test_an_image_is_never_cut(how, tmp_path, folder):
    file = written(tmp_path, record(images=[RED]))
    settings = {"filter_overlong_prompts": False, "truncation": how, "max_prompt_length": 20}
    with pytest.raises(UserError, match="never cut") as caught:
        dataset(file, folder, **settings)[0]
    assert "data.max_prompt_length" in str(caught.value)


# Other doors


def test_prompts_without_scores_have_images_too(tmp_path, folder):
    row = dataset(written(tmp_path, record(images=[RED])), folder, UnscoredDataset)[0]
    assert row.images is not None and row.tokens.count(IMAGE) == 4


def test_prepared_geometry_problems_are_read(tmp_path, folder):
    """What `paddock data geo3k` writes."""
    raw = {"problem": "<image>Find x.", "answer": "4", "images": [{"bytes": encoded(painted()), "path": "a.png"}]}
    rows = [geometry_row(Record(raw, "test 0"))]
    parquet.write_table(pa.Table.from_pylist(rows, schema=arrow_schema(COLUMNS)), tmp_path / "geo.parquet")
    row = dataset(str(tmp_path / "geo.parquet"), folder)[0]
    assert (row.data_source, row.ground_truth, row.tokens.count(IMAGE)) == ("hiyouga/geometry3k", "4", 4)
