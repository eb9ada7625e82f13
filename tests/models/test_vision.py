"""Images in forwards: packed as padded, one processing a group, and positions that are the model's own."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("PIL", reason="needs the extra `vision`")

from tiny_models import save_tiny, tiny_model
from tiny_vision import (
    END,
    FAMILIES,
    IMAGE,
    START,
    VIDEO,
    painted,
    prompt_of,
    reader_of,
    save_tiny_vision,
    vision_batch,
)

from paddock.config.engine import OptimConfig
from paddock.core.batch import Batch
from paddock.core.images import Images
from paddock.core.masked import Denominators, aggregate
from paddock.engines.rollout.base import Limits, Prompt, Request, Sampling
from paddock.engines.rollout.embedded.engine import EmbeddedEngine
from paddock.engines.rollout.hf import HFEngine
from paddock.engines.train.engine import Engine
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.single import SingleBackend
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.models.fused import fuse, fused
from paddock.models.image_reader import ImageReader, load_processor
from paddock.models.load import load_backbone, load_causal_lm
from paddock.models.packing import pack
from paddock.models.sharing import pack_shared
from paddock.models.token_stats import Head, token_stats
from paddock.models.value_head import ValueModel
from paddock.models.vision import blank, freeze_tower, place_images, positions_of, tower_of, vision_tokens

NEVER = (START, END, IMAGE, VIDEO)
WANT = frozenset({"log_probs", "entropy", "sum_pi_squared"})
GREEDY = Sampling(max_tokens=8, stop_tokens=frozenset({1}), seed=3, step=1, temperature=0.0)
SAMPLED = replace(GREEDY, temperature=0.8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: save_tiny_vision(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.fixture(params=FAMILIES)
def folder(request: Any, folders: dict[str, Path]) -> Path:
    return folders[request.param]


@cache
def loaded(folder: Path) -> Any:
    return load_causal_lm(str(folder))


@pytest.fixture
def model(folder: Path) -> Any:
    """A model of its own for each test: a copy takes a fifth of the time of another load."""
    return deepcopy(loaded(folder))


@pytest.fixture
def prompts(folder: Path) -> list[tuple[list[int], Images | None]]:
    return [*questions(folder)]


@cache
def questions(folder: Path) -> list[tuple[list[int], Images | None]]:
    """One image, none, and two of other shapes."""
    reader = reader_of(folder)
    two = [painted((0, 255, 0), 32, 16), painted((9, 9, 200), 8, 24)]
    return [prompt_of(reader, [painted()]), prompt_of(reader, []), prompt_of(reader, two, "Which is larger?")]


def engine(model: Any, **changes: Any) -> Engine:
    return Engine(SingleBackend(model, Settings(**changes)))


def asked(prompts: list[tuple[list[int], Images | None]], samples: int = 3) -> list[Prompt]:
    return [Prompt(tokens, [10 * i + j for j in range(samples)], seen) for i, (tokens, seen) in enumerate(prompts)]


def answered(prompts: list[Prompt], found: list[Any], width: int) -> Batch:
    rows = [prompt for prompt in prompts for _ in prompt.rows]
    batch = vision_batch([(prompt.tokens, prompt.images) for prompt in rows], samples=1, width=width)
    tokens = torch.tensor([one.tokens + [0] * (width - len(one.tokens)) for one in found])
    lengths = torch.tensor([len(one.tokens) for one in found])
    return batch.with_(responses=tokens, lengths=lengths, mask=(torch.arange(width) < lengths[:, None]).float())


# Forwards


def test_packed_rows_have_the_log_probs_of_padded_ones(model, prompts):
    batch = vision_batch(prompts)
    packed, padded = engine(model).forward(batch, WANT), engine(model, packed=False).forward(batch, WANT)
    for name in WANT:
        torch.testing.assert_close(getattr(packed, name), getattr(padded, name), rtol=0, atol=1e-5)


def test_log_probs_are_those_of_the_models_own_forward_and_positions(folder, prompts):
    """The model computes positions by itself, of types of tokens, as `generate` has it do."""
    own = load_causal_lm(str(folder), attn="sdpa")
    batch = vision_batch(prompts, samples=1)
    found = engine(load_causal_lm(str(folder))).forward(batch, WANT).log_probs
    for row, (tokens, seen) in enumerate(prompts):
        length = int(batch.lengths[row])
        ids = torch.tensor([tokens + batch.responses[row, :length].tolist()])
        shown = {}
        if seen is not None:
            shown = {"pixel_values": seen.pixels, "image_grid_thw": seen.grids,
                     "mm_token_type_ids": (ids == IMAGE).int()}  # fmt: skip
        with torch.no_grad():
            logits = own(input_ids=ids, attention_mask=torch.ones_like(ids), **shown).logits[0, len(tokens) - 1 : -1]
        logits[:, list(vision_tokens(own.config))] = -torch.inf
        expected = logits.log_softmax(-1).gather(1, ids[0, len(tokens) :, None])[:, 0]
        torch.testing.assert_close(found[row, :length], expected, rtol=0, atol=1e-5)


def test_positions_are_those_of_the_models_own_rule(model, prompts):
    for tokens, seen in (prompt for prompt in prompts if prompt[1]):
        more = 5
        ids = torch.tensor([[*tokens, *range(50, 50 + more)]])
        expected, delta = model.base_model.get_rope_index(
            ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=seen.grids
        )
        assert positions_of(seen, len(tokens) + more).tolist() == expected[:, 0].tolist()
        assert seen.offset == int(delta) < 0


def test_the_pixels_matter(model, prompts):
    """Were features left out, answers would not depend on what the image shows."""
    tokens, seen = prompts[0]
    other = replace(seen, pixels=seen.pixels.flip(0))
    first, second = (engine(model).forward(vision_batch([(tokens, one)], 1), WANT).log_probs for one in (seen, other))
    assert (first - second).abs().max() > 1e-2


def test_packing_does_not_change_gradients(folder, prompts):
    gradients = []
    for packed, budget in ((True, Budget(16384)), (True, Budget(64)), (False, Budget(16384))):
        trained = engine(load_causal_lm(str(folder)), optim=OptimConfig(lr=0.0), packed=packed, budget=budget)
        gradients.append(gradient_of(trained, vision_batch(prompts)))
    for other in gradients[1:]:
        for name, value in gradients[0].items():
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert any(name.startswith("model.visual") and value.abs().max() > 0 for name, value in gradients[0].items())


def test_a_groups_prompt_with_its_images_is_computed_once(folder, prompts):
    """As `pack`, from fewer tokens: features, positions behind the prompt, and gradients."""
    batch, found = vision_batch(prompts, samples=4), []
    assert len(pack_shared(batch).tokens[0]) < 0.6 * len(pack(batch).tokens[0])
    for share in (True, False):
        trained = engine(load_causal_lm(str(folder)), optim=OptimConfig(lr=0.0), share_prompts=share)
        assert trained.backend.shares_prompts is share
        found.append((trained.forward(batch, WANT).log_probs, gradient_of(trained, batch)))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-5)
    for name, value in found[0][1].items():
        torch.testing.assert_close(value, found[1][1][name], rtol=1e-4, atol=1e-5, msg=name)


def gradient_of(trained: Engine, batch: Batch) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    clip = trained.updater.clip

    def catch() -> torch.Tensor:
        found.update({name: master.grad.clone() for name, master in trained.updater.named_masters().items()})
        return clip()

    trained.updater.clip = catch
    trained.train_step(trained.micro_batches(batch), mean_log_prob(batch), frozenset({"log_probs"}))
    return found


def mean_log_prob(whole: Batch) -> Any:
    denominators = Denominators.count(whole.need("mask"))
    return lambda micro, outputs: (-aggregate(outputs.log_probs, micro.need("mask"), "token-mean", denominators), {})


def test_recomputed_layers_give_the_same_gradients(folder, prompts):
    first, second = (
        gradient_of(
            engine(load_causal_lm(str(folder)), optim=OptimConfig(lr=0.0), checkpointing=checkpointing),
            vision_batch(prompts),
        )
        for checkpointing in (False, True)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_samples_of_a_group_share_one_processing(model, prompts, monkeypatch):
    """Pixels go through the tower once for all answers of a micro-batch, and are not copied on the way."""
    patches = []
    tower = tower_of(model)
    forward = type(tower).forward

    def count(self: Any, pixels: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        patches.append(len(pixels))
        return forward(self, pixels, *args, **kwargs)

    monkeypatch.setattr(type(tower), "forward", count)
    batch = vision_batch(prompts, samples=8)
    engine(model).forward(batch, WANT)
    assert patches == [sum(len(seen.pixels) for _, seen in prompts if seen)]
    picked = batch.rows(torch.tensor([3, 1])).with_(values=None)
    assert picked.extras["images"][0] is picked.extras["images"][1] is prompts[0][1]
    patches.clear()
    EmbeddedEngine(model).generate(asked(prompts, 4), GREEDY)
    assert sum(patches) == sum(len(seen.pixels) for _, seen in prompts if seen)


def test_a_stream_without_images_is_left_alone(model, prompts):
    inputs = pack(vision_batch([prompts[1]]))
    assert inputs.images is None and inputs.positions.dim() == 2
    assert place_images([None, None], [3, 4], "cpu") is None


def test_the_smallest_image_in_no_place_changes_nothing(model, prompts):
    """What a rank without images computes beside ranks that have some."""
    inputs = pack(vision_batch([prompts[1]]))
    beside = replace(inputs, images=blank(model, torch.device("cpu")))
    torch.testing.assert_close(beside.hidden(model), inputs.hidden(model), rtol=0, atol=1e-6)


def test_a_slice_of_the_stream_takes_its_own_features(model, prompts):
    _, placed = place_images([prompts[0][1], prompts[2][1]], [len(prompts[0][0]), len(prompts[2][0])], "cpu")
    whole = len(prompts[0][0]) + len(prompts[2][0])
    for start, length in ((0, 15), (15, whole - 15)):
        part = placed.part(start, length)
        assert (part.token_index + start).tolist() == [
            p for p in placed.token_index.tolist() if start <= p < start + length
        ]
        kept = [
            f
            for p, f in zip(placed.token_index.tolist(), placed.features.tolist(), strict=True)
            if start <= p < start + length
        ]
        assert part.features.tolist() == kept


# Rollouts


def test_both_engines_give_the_same_greedy_tokens_and_log_probs(model, prompts):
    embedded = EmbeddedEngine(model, max_num_seqs=4).generate(asked(prompts), GREEDY)
    plain = HFEngine(model, max_num_seqs=4).generate(asked(prompts), GREEDY)
    assert [one.tokens for one in embedded] == [one.tokens for one in plain]
    for one, other in zip(embedded, plain, strict=True):
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), rtol=0, atol=1e-5)


def test_a_next_turn_behind_images_draws_what_the_whole_conversation_draws(model, prompts):
    tokens, images = prompts[0]
    parked, anew, plain = EmbeddedEngine(model), EmbeddedEngine(model), HFEngine(model)
    parked.resume(SAMPLED, Limits([(len(tokens), 1)]))
    parked.submit([Request(tokens, [0], [0], SAMPLED.step, 3, images=images, keep=True)])
    (first,) = parked.advance()
    said = [*tokens, *first.tokens, 70, 71]
    turn = Request(said, [0], [0], SAMPLED.step, 3, len(said) - len(tokens), images)
    parked.submit([turn])
    (found,) = parked.advance()
    parked.pause()
    for other in (anew, plain):
        other.resume(SAMPLED, Limits.of([turn]))
        other.submit([turn])
        (expected,) = other.advance()
        other.pause()
        assert found.tokens == expected.tokens
        torch.testing.assert_close(torch.tensor(found.log_probs), torch.tensor(expected.log_probs), rtol=0, atol=2e-5)


@pytest.mark.parametrize("engine_type", [EmbeddedEngine, HFEngine])
def test_log_probs_of_the_rollout_are_those_of_the_trainer(engine_type, model, prompts):
    found = engine_type(model, max_num_seqs=4).generate(asked(prompts), SAMPLED)
    batch = answered(asked(prompts), found, 8)
    trained = engine(model, temperature=SAMPLED.temperature).forward(batch, WANT).log_probs
    for row, one in enumerate(found):
        torch.testing.assert_close(trained[row, : len(one.tokens)], torch.tensor(one.log_probs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("engine_type", [EmbeddedEngine, HFEngine])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, replace(SAMPLED, top_k=3)])
def test_words_of_images_are_never_drawn(engine_type, sampling, model, prompts):
    never = vision_tokens(model.config)
    assert set(NEVER) <= set(never)
    with torch.no_grad():
        model.get_output_embeddings().weight[list(never)] = model.get_output_embeddings().weight[list(never)] * 50
    found = engine_type(model).generate(asked(prompts), sampling)
    assert not {token for one in found for token in one.tokens} & set(never)


def test_words_that_are_never_drawn_have_no_share_of_any_statistic():
    """Against the formulas over the other words, with gradients."""
    hidden, weight = torch.randn(5, 8, dtype=torch.float64), torch.randn(3000, 8, dtype=torch.float64)
    tokens, never = torch.tensor([1, 7, 2999, 1500, 2]), (0, 1023, 1024, 2998)
    results = []
    for banned in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if banned:
            found = token_stats(h, Head(w, never=never), tokens, 0.7, entropy=True, sum_pi_squared=True)
            values = found.log_probs, found.entropy, found.sum_pi_squared
        else:
            z = (h @ w.t() / 0.7).index_fill(1, torch.tensor(never), -torch.inf)
            p, log_p = z.softmax(-1), z.log_softmax(-1)
            entropy = -(p * log_p.masked_fill(p == 0, 0)).sum(-1)
            values = log_p.gather(1, tokens[:, None])[:, 0], entropy, p.square().sum(-1)
        (values[0].sum() + 0.3 * values[1].sum()).backward()
        results.append([*(value.detach() for value in values), h.grad, w.grad])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    assert results[0][-1][list(never)].abs().max() == 0


def test_text_models_have_no_such_words():
    assert vision_tokens(tiny_model("qwen3").config) == ()


# The tower


def test_a_frozen_tower_does_not_move_and_the_rest_does(folder, prompts):
    model = load_causal_lm(str(folder))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    freeze_tower(model, None)
    trained = engine(model, optim=OptimConfig(lr=0.01))
    batch = vision_batch(prompts)
    for _ in range(2):
        trained.train_step(trained.micro_batches(batch), mean_log_prob(batch), frozenset({"log_probs"}))
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved and not any("visual" in name for name in moved)
    assert not any("visual" in name for name in trained.updater.names)


def test_a_frozen_tower_computes_in_the_type_of_the_rest(folders, prompts, folder):
    model = load_causal_lm(str(folder))
    freeze_tower(model, torch.bfloat16)
    assert {p.dtype for p in tower_of(model).parameters()} == {torch.bfloat16}


def test_a_text_model_has_no_tower_to_freeze(tmp_path):
    with pytest.raises(UserError, match="no vision tower"):
        freeze_tower(load_causal_lm(str(save_tiny(tmp_path))), None)


def test_a_critic_sees_images_too(folder, prompts):
    batch, values = vision_batch(prompts), []
    for packed in (True, False):
        critic = ValueModel(load_backbone(str(folder)))
        torch.nn.init.constant_(critic.value_head.weight, 0.1)
        values.append(engine(critic, packed=packed).forward(batch, frozenset({"values"})).values)
    torch.testing.assert_close(*values, rtol=0, atol=1e-5)
    assert values[0].abs().max() > 0


def test_the_fused_forward_steps_aside_with_a_reason(model, monkeypatch):
    monkeypatch.setattr("paddock.models.fused.decoder.can_launch", lambda tensor: True)
    assert "has no embed_tokens" in fuse(model)
    assert fused(model) is None


# How images are read


def settings(folder: Path, *overrides: str) -> Any:
    small = ["algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={folder}", "data.train_files=x.parquet"]
    return load([*small, "actor_rollout_ref.rollout.name=embedded", "trainer.device=cpu", *overrides]).config


def test_an_image_of_some_size_takes_as_many_tokens_as_foretold(folder):
    reader = reader_of(folder)
    for width, height in ((8, 8), (16, 40), (50, 20), (100, 100), (3, 9)):
        tokens, seen = prompt_of(reader, [painted(width=width, height=height)])
        assert tokens.count(IMAGE) == len(seen.token_index) == reader.features(height, width)
        assert len(seen.pixels) == 4 * len(seen.token_index)


def reader_by(config):
    return ImageReader.of(config.actor_rollout_ref, config.data)


def test_limits_of_an_images_area_are_honoured(folder):
    small, usual, large = reader_of(folder, max_pixels=128), reader_of(folder), reader_of(folder, min_pixels=1024)
    assert small.features(64, 64) < usual.features(64, 64)
    assert usual.features(8, 8) < large.features(8, 8)
    assert small.identity() != large.identity()
    config = settings(folder, "+data.mm_processor_kwargs.max_pixels=128")
    assert reader_by(config).features(64, 64) == small.features(64, 64)


def test_other_settings_of_the_processor_are_refused(folder):
    with pytest.raises(UserError, match="limits are all") as caught:
        reader_by(settings(folder, "+data.mm_processor_kwargs.do_resize=False"))
    assert "mm_processor_kwargs.do_resize" in str(caught.value)


def test_another_size_of_patches_is_refused(folder):
    assert reader_by(settings(folder, "data.image_patch_size=4")) is not None
    with pytest.raises(UserError, match="4 pixels"):
        reader_by(settings(folder, "data.image_patch_size=14"))


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_engines_with_weights_of_their_own_are_refused_by_name(name, folder):
    with pytest.raises(UserError, match=f"not handed to {name}"):
        reader_by(settings(folder, f"actor_rollout_ref.rollout.name={name}"))


def test_without_pillow_the_user_is_told_what_to_install(folder, monkeypatch):
    monkeypatch.setattr("paddock.models.image_reader.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"paddock-rl\[vision\]"):
        reader_by(settings(folder))


def test_a_folder_that_does_not_say_how_images_are_read_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match=r"no preprocessor_config\.json"):
        load_processor(tmp_path, {})
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "CLIPImageProcessor"}')
    with pytest.raises(UserError, match="not known: CLIPImageProcessor"):
        load_processor(tmp_path, {})


@pytest.mark.parametrize(
    "limits",
    [
        {"min_pixels": 64, "max_pixels": 512},
        {"size": {"min_pixels": 64, "max_pixels": 512}},
        {"size": {"shortest_edge": 64, "longest_edge": 512}},
    ],
)
def test_limits_are_found_wherever_a_file_has_them(limits, tmp_path):
    """Published files of three ages, with what else they hold."""
    other = {"image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen2_5_VLProcessor",
             "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "do_resize": True, "resample": 3,
             "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "rescale_factor": 1 / 255}  # fmt: skip
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(other | limits))
    found = load_processor(tmp_path, {})
    assert (found.size["shortest_edge"], found.size["longest_edge"]) == (64, 512)
    assert found(images=[painted(width=64, height=64)], return_tensors="pt")["image_grid_thw"].prod() * 16 <= 512


def test_settings_inside_of_a_processors_file_are_read(folder, tmp_path):
    """Where newer versions of transformers write them."""
    own = json.loads((folder / "preprocessor_config.json").read_text())
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": own, "processor_class": "X"}))
    assert load_processor(tmp_path, {}).to_dict() == load_processor(folder, {}).to_dict()


def test_a_text_model_reads_no_images(tmp_path):
    assert reader_by(settings(save_tiny(tmp_path))) is None
