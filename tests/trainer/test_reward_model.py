"""Runs that a model scores: whose score a row gets, on which token, by which tokens read, and what is refused."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import EOS, PAD, SHAPE, byte_tokenizer, one_turn_each, save_tiny
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, Qwen2Config

from paddock.cli import main
from paddock.commands.preflight import check
from paddock.data.dataset import MODEL, RULE, PromptRow
from paddock.data.loader import prompt_batch
from paddock.engines.rollout.base import Completion, Prompt
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.loading.rules import Scope, require
from paddock.models.load import load_tokenizer
from paddock.rollouts.batch import with_responses
from paddock.trainer.model_rewards import ModelRewards, training_styles
from paddock.trainer.reinforcement import train
from paddock.workers.reward_model import open_reward_model

SMALL = [
    "algorithm.adv_estimator=gae",
    "data.train_batch_size=8",
    "data.val_max_samples=16",
    "actor_rollout_ref.rollout.n=2",
    "trainer.total_training_steps=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "trainer.test_freq=2",
    "trainer.val_before_train=False",
    "trainer.logger=[file]",
    "data.dataloader_num_workers=0",
    "reward_model.enable=True",
    "reward_model.model.fsdp_config.dtype=float32",
]
STOPS = frozenset({EOS})


def classifier(folder, kind=AutoModelForSequenceClassification, tokenizer=None, **overrides):
    """A tiny reward model of transformers' own, over the bytes that the embedded policy writes."""
    config = Qwen2Config(**{**SHAPE, "vocab_size": 300, "num_labels": 1, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = kind.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    (tokenizer or load_tokenizer("builtin:tiny")).save_pretrained(folder)
    return model


def loaded(*overrides):
    return load([*SMALL, *overrides]).config


def opened(config, tokenizer):
    return open_reward_model(config.reward_model, config.data, config.trainer, tokenizer, STOPS)


def run(folder, *overrides):
    config = loaded(f"trainer.default_local_dir={folder}", f"trainer.rollout_data_dir={folder}/rollouts", *overrides)
    assert train(config).finished
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rollouts = [json.loads(line) for line in (folder / "rollouts" / "1.jsonl").read_text().splitlines()]
    return lines, rollouts


def batch_of(tokenizer, prompts, answers, style=MODEL):
    """Responses as a rollout engine returns them."""
    rows = []
    for number, prompt in enumerate(prompts):
        text = prompt if isinstance(prompt, str) else tokenizer.apply_chat_template(
            prompt, tokenize=False, add_generation_prompt=True)  # fmt: skip
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        rows.append(PromptRow(number, number, tokens, prompt, "mine", "4", {}, f"file row {number}", style))
    batch = prompt_batch(rows, 1, PAD)
    ids = [tokenizer(answer, add_special_tokens=False)["input_ids"] + [EOS] for answer in answers]
    found = [
        Completion(row, tokens, [0.0] * len(tokens), True) for row, tokens in zip(batch.row.tolist(), ids, strict=True)
    ]
    asked = [Prompt(row.tokens, [row.group]) for row in rows]
    return with_responses(batch, one_turn_each(found, asked, batch.group.tolist(), version=0), PAD)


def plain_scores(model, texts):
    """One forward for each, by transformers itself."""
    tokenizer = load_tokenizer("builtin:tiny")
    with torch.no_grad():
        return [model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits[0, 0].item() for text in texts]


def test_a_run_is_scored_by_the_model_alone_and_validated_by_its_rule(tmp_path):
    own = classifier(tmp_path / "rm")
    lines, rollouts = run(tmp_path / "run", f"reward_model.model.path={tmp_path}/rm")
    texts = [row["prompt"] + row["answer"] + "<eos>" for row in rollouts if row["length"] < 8]
    expected = plain_scores(own, texts)
    ended = [row for row in rollouts if row["length"] < 8]
    assert len(ended) > 8
    for row, score in zip(ended, expected, strict=True):
        assert row["score"] == row["extras"]["model_score"] == pytest.approx(score, abs=1e-4)
    step = lines[0]
    scores = torch.tensor([row["score"] for row in rollouts])
    assert step["reward/model/mean"] == pytest.approx(scores.mean().item(), abs=1e-5)
    assert step["reward/model/std"] == pytest.approx(scores.std(correction=0).item(), abs=1e-5)
    assert step["reward/model/min"] == pytest.approx(scores.min().item(), abs=1e-5)
    for name in ("critic/score/mean", "reward/score/mean"):
        assert step[name] == pytest.approx(step["reward/model/mean"], abs=1e-5)
    assert "reward/rule/mean" not in step
    assert 0 <= lines[1]["val-core/paddock/addition/reward/mean@1"] <= 1
    assert "val-aux/paddock/addition/model_score/mean@1" in lines[1]


def test_rules_and_model_add_up_with_their_weights(tmp_path):
    classifier(tmp_path / "rm")
    weights = ("reward_model.model_weight=0.5", "reward_model.rule_weight=3", "actor_rollout_ref.rollout.n=8")
    lines, rollouts = run(tmp_path / "run", f"reward_model.model.path={tmp_path}/rm", *weights)
    assert any(row["extras"]["rule_score"] for row in rollouts)
    for row in rollouts:
        right = float(row["answer"].strip() == row["ground_truth"])
        assert row["extras"]["rule_score"] == right
        assert row["score"] == pytest.approx(3 * right + 0.5 * row["extras"]["model_score"], abs=1e-4)
    assert lines[0]["reward/rule/mean"] == pytest.approx(sum(row["extras"]["rule_score"] for row in rollouts) / 64)
    assert 0 <= lines[1]["val-core/paddock/addition/reward/mean@1"] <= 1


def test_a_rows_own_style_decides_between_rule_and_model(tmp_path):
    classifier(tmp_path / "rm")
    rows = [
        {"data_source": source, "prompt": f"{n}+1=", "reward_model": {"style": style, "ground_truth": truth}}
        for n in range(10, 18)
        for source, style, truth in (("paddock/addition", "rule", str(n + 1)[::-1]), ("people/talk", "model", None))
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = (f"data.train_files={tmp_path}/rows.jsonl", f"data.val_files={tmp_path}/rows.jsonl", "data.shuffle=False",
            "actor_rollout_ref.model.path=builtin:tiny", "data.max_response_length=8", "data.max_prompt_length=16",
            "actor_rollout_ref.actor.fsdp_config.dtype=float32", "trainer.test_freq=1")  # fmt: skip
    lines, rollouts = run(tmp_path / "run", f"reward_model.model.path={tmp_path}/rm", *data)
    by_rule = [row for row in rollouts if row["data_source"] == "paddock/addition"]
    by_model = [row for row in rollouts if row["data_source"] == "people/talk"]
    assert len(by_rule) == len(by_model) == 8
    for row in by_rule:
        assert row["score"] == row["extras"]["rule_score"] and row["extras"]["model_score"] is None
    for row in by_model:
        assert row["score"] == pytest.approx(row["extras"]["model_score"]) and row["extras"]["rule_score"] is None
    assert "val-core/people/talk/reward/mean@1" in lines[0] and "val-core/paddock/addition/reward/mean@1" in lines[0]


@pytest.mark.parametrize(
    ("settings", "styles", "expected"),
    [
        ({}, {RULE}, {RULE: MODEL}),  # it was enabled to score something
        ({}, {RULE, MODEL}, {}),
        ({"model_weight": 2.0}, {RULE, MODEL}, {RULE: MODEL}),
        ({"model_weight": 1.0, "rule_weight": 0.0}, {RULE}, {RULE: MODEL}),
        ({"model_weight": 1.0, "rule_weight": 0.1}, {RULE, MODEL}, {RULE: "both"}),
        ({"enable": False}, {RULE, MODEL}, {MODEL: RULE}),  # a function of the user's own may know what to do
    ],
)
def test_who_scores_a_row_follows_from_its_style_and_the_weights(settings, styles, expected):
    config = loaded("reward_model.model.path=x").reward_model
    for name, value in settings.items():
        setattr(config, name, value)
    assert training_styles(config)(styles) == expected


def test_a_penalty_for_length_is_not_weighed_with_the_rule(tmp_path):
    classifier(tmp_path / "rm")
    buffer = "reward_model.reward_kwargs.overlong_buffer_cfg"
    overlong = (f"{buffer}.enable=True", f"{buffer}.len=8", f"{buffer}.penalty_factor=1.0", f"{buffer}.log=True")
    weights = ("reward_model.model_weight=1", "reward_model.rule_weight=5")
    _, rollouts = run(tmp_path / "run", f"reward_model.model.path={tmp_path}/rm", *overlong, *weights)
    assert any(row["extras"]["overlong_reward"] < 0 for row in rollouts)
    for row in rollouts:
        extras = row["extras"]
        expected = extras["model_score"] + 5 * extras["rule_score"] + extras["overlong_reward"]
        assert row["score"] == pytest.approx(expected, abs=1e-4)


def test_scores_stand_on_the_last_token_that_the_policy_wrote(tmp_path):
    classifier(tmp_path)
    config = loaded(f"reward_model.model.path={tmp_path}")
    tokenizer = load_tokenizer("builtin:tiny")
    batch = batch_of(tokenizer, ["1+1=", "20+3="], ["2", "32!!"])
    models = ModelRewards(opened(config, tokenizer), config.reward_model)
    zeros = batch.with_(scores=torch.zeros(batch.mask.shape), extras={**batch.extras, "score": [0.0, 0.0]})
    filled, _ = models.add(zeros, ["2", "32!!"], {})
    assert (filled.scores != 0).nonzero().tolist() == [[0, 1], [1, 4]]
    assert filled.scores.sum(-1).tolist() == pytest.approx(filled.extras["model_score"])


def test_a_token_classifier_scores_every_token_where_that_is_asked(tmp_path):
    own = classifier(tmp_path, AutoModelForTokenClassification)
    tokenizer = load_tokenizer("builtin:tiny")
    batch = batch_of(tokenizer, ["1+1=", "20+3="], ["2", "32!!"])
    found = {}
    for asked in (True, False):
        config = loaded(f"reward_model.model.path={tmp_path}", f"reward_model.token_level={asked}")
        found[asked] = opened(config, tokenizer).scores(batch, ["2", "32!!"])
    for row, text in enumerate(("1+1=2<eos>", "20+3=32!!<eos>")):
        with torch.no_grad():
            logits = own(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits[0, :, 0]
        length = int(batch.lengths[row])
        torch.testing.assert_close(found[True].tokens[row, :length], logits[-length:], atol=1e-4, rtol=1e-4)
        assert (found[True].tokens[row, length:] == 0).all()
        assert found[True].rows[row].item() == pytest.approx(logits[-length:].sum().item(), abs=1e-3)
        assert found[False].rows[row].item() == pytest.approx(logits[-1].item(), abs=1e-4)
    assert found[False].tokens is None


def test_a_run_with_scores_on_every_token_trains(tmp_path):
    classifier(tmp_path / "rm", AutoModelForTokenClassification)
    lines, _ = run(tmp_path / "run", f"reward_model.model.path={tmp_path}/rm", "reward_model.token_level=True")
    assert lines[-1]["actor/skipped"] == 0 and lines[0]["critic/score/mean"] == pytest.approx(
        lines[0]["reward/model/mean"]
    )


CHAT = [{"role": "user", "content": "2+2?"}]
OTHER_TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"


def test_another_tokenizer_and_template_read_the_conversation_anew(tmp_path):
    """The reward model's own rendering, through transformers, gives the same score."""
    reader = byte_tokenizer()
    reader.chat_template = OTHER_TEMPLATE
    own = classifier(tmp_path / "rm", tokenizer=reader)
    config = loaded(f"reward_model.model.path={tmp_path}/rm")
    writer = load_tokenizer("builtin:tiny")
    batch = batch_of(writer, [CHAT, "5+5="], ["four", "01"])
    found = opened(config, writer).scores(batch, ["four", "01"])
    rendered = reader.apply_chat_template([*CHAT, {"role": "assistant", "content": "four"}], tokenize=False)
    assert rendered == "[user]2+2?;[assistant]four;"
    with torch.no_grad():
        expected = [
            own(input_ids=torch.tensor([reader(text, add_special_tokens=False)["input_ids"]])).logits.item()
            for text in (rendered, "5+5=01<eos>")
        ]
    assert found.rows.tolist() == pytest.approx(expected, abs=1e-4)


def test_long_conversations_are_cut_and_counted(tmp_path):
    own = classifier(tmp_path)
    tokenizer = load_tokenizer("builtin:tiny")
    config = loaded(f"reward_model.model.path={tmp_path}", "reward_model.max_length=5")
    found = opened(config, tokenizer).scores(batch_of(tokenizer, ["1+1=", "1="], ["2345", "2"]), [])
    assert found.metrics["reward/model/cut"] == 1
    assert found.rows.tolist() == pytest.approx(plain_scores(own, ["1+1=2", "1=2<eos>"]), abs=1e-4)


def test_how_rows_are_cut_into_forwards_changes_no_score(tmp_path):
    classifier(tmp_path)
    tokenizer = load_tokenizer("builtin:tiny")
    answers = ["1" * n for n in range(1, 8)]
    batch = batch_of(tokenizer, ["1+1="] * 7, answers)
    settings = [
        "forward_max_token_len_per_gpu=32768",
        "forward_max_token_len_per_gpu=12",
        "micro_batch_size_per_gpu=2",
        "model.use_remove_padding=False",
        "model.fsdp_config.param_offload=True",
    ]
    configs = [loaded(f"reward_model.model.path={tmp_path}", f"reward_model.{setting}") for setting in settings]
    found = [opened(config, tokenizer).scores(batch, answers) for config in configs]
    for other in found[1:]:
        torch.testing.assert_close(other.rows, found[0].rows, atol=1e-4, rtol=1e-4)


def test_a_sequence_beyond_the_token_budget_names_the_key(tmp_path):
    classifier(tmp_path)
    tokenizer = load_tokenizer("builtin:tiny")
    scorer = opened(
        loaded(f"reward_model.model.path={tmp_path}", "reward_model.forward_max_token_len_per_gpu=7"), tokenizer
    )
    scorer.scores(batch_of(tokenizer, ["1+1="], ["23"]), [])  # seven tokens
    with pytest.raises(
        UserError, match=r"forward_max_token_len_per_gpu=7: .* 8 tokens(.|\n)*reward_model.max_length=7"
    ):
        scorer.scores(batch_of(tokenizer, ["1+1="], ["234"]), [])


def test_a_score_that_is_not_a_number_stops_the_run_with_its_row(tmp_path):
    model = classifier(tmp_path)
    torch.nn.init.constant_(model.score.weight, float("nan"))
    model.save_pretrained(tmp_path)
    tokenizer = load_tokenizer("builtin:tiny")
    scorer = opened(loaded(f"reward_model.model.path={tmp_path}"), tokenizer)
    with pytest.raises(UserError, match="gave nan to a response to file row 0"):
        scorer.scores(batch_of(tokenizer, ["1+1="], ["2"]), [])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("reward_model.token_level=True",), r"token_level=True: the reward model scores whole sequences"),
        (
            ("reward_model.model.input_tokenizer=LM",),
            r"input_tokenizer=.*is not the tokenizer that the policy writes",
        ),
        (("reward_model.model.path=BARE",), r"its folder holds no tokenizer(.|\n)*input_tokenizer=null"),
        (("reward_model.model.path=LM",), r"Qwen2ForCausalLM, which gives no score"),
    ],
)
def test_what_cannot_score_is_refused_before_training(settings, message, tmp_path):
    classifier(tmp_path / "rm")
    save_tiny(tmp_path / "LM")
    classifier(tmp_path / "BARE")
    for file in (tmp_path / "BARE").glob("*token*"):
        file.unlink()
    config = loaded(
        f"reward_model.model.path={tmp_path}/rm", *(re.sub("=([A-Z]+)$", rf"={tmp_path}/\1", s) for s in settings)
    )
    with pytest.raises(UserError, match=message):
        opened(config, load_tokenizer("builtin:tiny"))


def test_a_model_without_a_tokenizer_reads_the_policys_tokens_where_that_is_said(tmp_path):
    classifier(tmp_path)
    for file in tmp_path.glob("*token*"):
        file.unlink()
    config = loaded(f"reward_model.model.path={tmp_path}", "reward_model.model.input_tokenizer=null")
    assert opened(config, load_tokenizer("builtin:tiny")).transcriber.keeps_tokens


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("reward_model.enable_resource_pool=True",), "reward_model.nnodes=0: its pool has no node"),
        (("reward_model.ulysses_sequence_parallel_size=2",), "reward_model.ulysses_sequence_parallel_size=2"),
        (("reward_model.strategy=megatron",), "reward_model.strategy=megatron: is not built yet"),
        (("reward_model.model.path=/nowhere/rm",), "reward_model.model.path=/nowhere/rm: no such folder"),
    ],
)
def test_preflight_refuses_what_no_run_could_honour(settings, message, tmp_path):
    classifier(tmp_path)
    with pytest.raises(UserError, match=message):
        check(loaded(f"reward_model.model.path={tmp_path}", *settings))


SERVED = "judge.source=endpoint judge.url=http://x/v1 judge.model=m"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("judge.source=endpoint", r"reward_model.judge.url: .*needs it"),
        ("judge.source=endpoint judge.url=http://x/v1", r"reward_model.judge.model: .*needs it"),
        ("judge.source=endpoint judge.url=x:1 judge.model=m", r"judge.url=x:1: is not an address"),
        (f"{SERVED} model.path=x", r"reward_model.model.path=x: the judge is the server"),
        ("judge.source=engine", "has no model"),
        ("judge.url=http://x/v1 model.path=x", "no server is asked"),
        ("judge.source=engine model.path=x token_level=True", "a judge gives one score"),
        ("rule_weight=1 model.path=x", r"rule_weight=1.0: the model's weight is not set"),
        ("enable=False judge.source=engine", "only an enabled reward model can judge"),
    ],
)
def test_settings_that_contradict_each_other_are_named(settings, message):
    with pytest.raises(UserError, match=message):
        loaded(*(f"reward_model.{setting}" for setting in settings.split()))


@pytest.fixture
def server():
    """A judge that counts the characters of an answer."""

    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(self.path)
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = re.search(r"<answer>\s(.*)\s</answer>", body["messages"][0]["content"], re.S)[1]
            reply = {"choices": [{"message": {"content": f"Score: {len(answer)}"}}]}
            content = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{http.server_port}/v1", asked
    http.shutdown()
    http.server_close()


def test_a_run_is_scored_by_a_judge_behind_an_address(tmp_path, server):
    url, asked = server
    judge = ("reward_model.judge.source=endpoint", f"reward_model.judge.url={url}", "reward_model.judge.model=m")
    lines, rollouts = run(tmp_path, *judge)
    for row in rollouts:
        assert row["score"] == len(row["answer"])
    assert lines[0]["reward/judge/failed"] == 0
    assert "val-core/paddock/addition/reward/mean@1" in lines[1]
    assert len(asked) <= 1 + 2 * 16, "a judge is not asked about validation rows that a rule scores"


def test_our_own_engine_judges_with_the_words_that_it_writes(tmp_path):
    """The embedded adder as a judge: asked for a sum, it writes one, and the pattern reads its first digit."""
    (tmp_path / "rubric.txt").write_text("{response}")
    judge = ("reward_model.judge.source=engine", "reward_model.model.path=builtin:tiny",
             f"reward_model.judge.template_path={tmp_path}/rubric.txt", 'reward_model.judge.pattern="([0-9])"',
             "reward_model.rollout.dtype=float32", "reward_model.rollout.response_length=8")  # fmt: skip
    tokenizer = load_tokenizer("builtin:tiny")
    scores = {}
    for engine in ("embedded", "hf"):
        scorer = opened(loaded(*judge, f"reward_model.rollout.name={engine}"), tokenizer)
        answers = ["12+34=", "40+50=", "12+34="]
        found = scorer.scores(batch_of(tokenizer, ["?"] * 3, answers), answers)
        scores[engine] = found.rows.tolist()
        replies = scorer.judge.complete([[{"role": "user", "content": answer}] for answer in answers])
        digits = [re.findall(r"\d", reply.text)[-1:] for reply in replies]
        assert scores[engine] == [float(digit[0]) if digit else 0.0 for digit in digits]
    assert scores["embedded"] == scores["hf"]


def test_a_question_that_is_too_long_for_our_judge_is_counted(tmp_path):
    (tmp_path / "rubric.txt").write_text("{response}")
    judge = ("reward_model.judge.source=engine", "reward_model.model.path=builtin:tiny",
             f"reward_model.judge.template_path={tmp_path}/rubric.txt", 'reward_model.judge.pattern="([0-9])"',
             "reward_model.rollout.prompt_length=40", "reward_model.rollout.response_length=8",
             "reward_model.rollout.dtype=float32", "reward_model.judge.failed=-3")  # fmt: skip
    tokenizer = load_tokenizer("builtin:tiny")
    answers = ["12+34=", "9" * 50]
    found = opened(loaded(*judge), tokenizer).scores(batch_of(tokenizer, ["?"] * 2, answers), answers)
    assert found.rows.tolist()[1] == -3 and found.metrics["reward/judge/too_long"] == 1


@pytest.mark.parametrize("setting", ["name=vllm", "tensor_model_parallel_size=2"])
def test_an_engine_that_cannot_serve_a_judge_here_is_named(setting):
    judge = ("reward_model.judge.source=engine", "reward_model.model.path=builtin:tiny")
    with pytest.raises(UserError, match=rf"reward_model.rollout.{setting}(.|\n)*judge.source=endpoint"):
        require(loaded(*judge, f"reward_model.rollout.{setting}"), Scope.SCORING)


def test_settings_of_an_engine_that_nobody_starts_are_reported():
    overrides = [*SMALL, "reward_model.model.path=x", "reward_model.rollout.name=vllm"]
    assert any(warning.startswith("reward_model.rollout.name has no effect") for warning in load(overrides).warnings)


def test_the_evaluation_of_a_model_asks_the_reward_model_too(tmp_path, capsys):
    classifier(tmp_path / "rm")
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"data_source": "people/talk", "prompt": "1+1=", "reward_model": {"style": "model"}})
    )
    model = ("model=builtin:tiny", "rollout.dtype=float32", "data.max_response_length=8")
    reward = ("reward_model.enable=True", f"reward_model.model.path={tmp_path}/rm")
    assert main(["eval", *model, *reward, f"data={tmp_path}/rows.jsonl", f"--json={tmp_path}/found.json"]) == 0
    found = json.loads((tmp_path / "found.json").read_text())["sources"]["people/talk"]
    assert found["variable"] == "reward" and found["metrics"]["mean@1"] not in (0.0, 1.0)


def test_a_resumed_run_with_a_reward_model_equals_the_uninterrupted_one(tmp_path):
    classifier(tmp_path / "rm")
    settings = (f"reward_model.model.path={tmp_path}/rm", "trainer.save_freq=1", "trainer.test_freq=-1")
    run(tmp_path / "whole", *settings)
    for steps in (1, 2):
        run(tmp_path / "half", *settings, f"trainer.total_training_steps={steps}")
    whole, again = (load_file(tmp_path / name / "global_step_2/actor/model.safetensors") for name in ("whole", "half"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
