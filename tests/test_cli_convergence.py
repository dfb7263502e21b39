"""`liger convergence`: a run that stops goes on bit for bit, equal arms are equal, a broken kernel is found, files read back."""

import json
import sys
import time

import numpy as np
import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
pytest.importorskip("transformers")
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner

from liger_kernel.cli import convergence
from liger_kernel.cli.app import app
from liger_kernel.cli.child import Child
from liger_kernel.cli.convergence import arms, checkpoint, data, report, settings
from liger_kernel.cli.convergence.train import Log, learning_rate

MODEL = dict(model_type="llama", vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
             num_key_value_heads=1, max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=False)
MEASURED = ("tokens_per_s", "memory_bytes", "seconds")  # of this run; everything else is of the settings


def liger(*arguments, code=0):
    result = CliRunner(env={"COLUMNS": "180"}).invoke(app, ["convergence", *map(str, arguments)])
    assert result.exit_code == code, f"exit code {result.exit_code}\n{result.output}\n{result.exception!r}"
    return result.output


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """The options of a small run, but for --out."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40 + "Pack my box with five dozen jugs. " * 40)
    return (folder / "config.json", "--device", "cpu", "--batch", 2, "--seq", 16, "--tokens", 2 * 16 * 12, "--tokenizer", "bytes", "--data",
            folder / "text.txt")


@pytest.fixture(scope="module")
def whole(given, tmp_path_factory):
    """(folder, output) of an uninterrupted run of three arms."""
    out = tmp_path_factory.mktemp("whole")
    return out, liger(*given, "--out", out, "--spread")


def lasting(path):
    return [{k: v for k, v in json.loads(line).items() if k not in MEASURED} for line in path.read_text().splitlines()]


def test_report(whole):
    out, text = whole
    assert text.strip().splitlines()[-1].startswith("PASS: over 384 tokens") and "another seed" in text
    document = json.loads((out / "report.json").read_text())
    assert document["complete"] and set(document["arms"]) == {"baseline", "liger", "spread"} and document["parameters"] > 0
    assert "LigerRMSNorm" in document["patched"]["liger"]
    for arm in document["arms"].values():
        assert arm["step"] == list(range(1, 13)) and arm["tokens"][-1] == 384
        assert all(v > 0 for key in ("loss", "grad_norm", *MEASURED) for v in arm[key])
    ours, seeds = (document["found"]["differences"][name]["largest_raw"] for name in ("liger", "spread"))
    assert ours < 1e-5 < seeds
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2 and "http" not in page
    assert not (out / "liger").exists(), "the checkpoints of a run that has ended are dropped"


@pytest.fixture
def hurried(monkeypatch):
    """--minutes are over before an arm has started, however fast the machine: it trains a turn and is saved."""
    train = arms.train

    def hurry(configs, devices, minutes, begun, *rest):
        return train(configs, devices, minutes and 1 / 60, time.monotonic(), *rest)

    monkeypatch.setattr(arms, "train", hurry)


def test_stopped_run_goes_on_bit_for_bit(given, whole, hurried, tmp_path):
    first = liger(*given, "--out", tmp_path, "--spread", "--minutes", 0.1, "--part-mb", 1)
    assert "not finished" in first and "the same command goes on" in first
    stopped = {name: len(lasting(tmp_path / f"{name}.jsonl")) for name in ("baseline", "liger", "spread")}
    assert len(set(stopped.values())) == 1 and 0 < stopped["liger"] < 12, "all arms stop at the same step"
    assert checkpoint.step_of(tmp_path / "liger") == stopped["liger"]
    with (tmp_path / "liger.jsonl").open("a") as file:  # as of a run that was killed behind its checkpoint
        last = json.loads((tmp_path / "liger.jsonl").read_text().splitlines()[-1])
        file.write(json.dumps(last | {"step": stopped["liger"] + 1, "loss": 0.0}) + "\n" + '{"step": 9')
    liger(*given, "--out", tmp_path, "--spread")
    for name in stopped:
        assert lasting(tmp_path / f"{name}.jsonl") == lasting(whole[0] / f"{name}.jsonl")
    report_of_training, moved = (tmp_path / "report.json").read_text(), tmp_path / "moved.txt"
    moved.write_bytes(given[-1].read_bytes())
    again = liger(*given[:-1], moved, "--out", tmp_path, "--spread")
    assert "PASS" in again and "goes on" not in again
    assert (tmp_path / "report.json").read_text() == report_of_training, "a call that trains nothing knows no better"
    moved.write_bytes(given[-1].read_bytes()[::-1])
    other = liger(*given[:-1], moved, "--out", tmp_path, "--spread", code=2)
    assert "data was {" in other, "other text of as many tokens"


def test_several_devices(given, whole, hurried, tmp_path, monkeypatch):
    """Each takes the next arm that waits; another division of the work is the same run, stopped or not."""
    begun = []

    class Arm(arms.Arm):
        def __init__(self, config, progress):
            begun.append((config["arm"], config["shared"]))
            super().__init__(config, progress)

    monkeypatch.setattr(arms, "Arm", Arm)
    monkeypatch.setattr(convergence, "devices_of", lambda device, count: ["cpu", "cpu"])
    first = liger(*given, "--out", tmp_path, "--spread", "--minutes", 0.1)
    assert "not finished" in first and {name for name, *_ in begun} == {"baseline", "liger"}, "no arm begins that has no time left"
    begun.clear()
    liger(*given, "--out", tmp_path, "--spread")
    assert begun == [(name, False) for name in ("baseline", "liger", "spread")]
    for name, *_ in begun:
        assert lasting(tmp_path / f"{name}.jsonl") == lasting(whole[0] / f"{name}.jsonl")


def test_an_arm_that_fails_ends_the_others(given, tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("def apply(model):\n    raise ValueError('broken on purpose')\n")
    config = settings.settings(str(given[0]), "cpu", 10**9, batch=2, seq=16, seed=0, log_every=1, checkpoint="none")
    config |= dict(data={"kind": "synthetic"}, data_seed=0, part_bytes=1 << 30, folder=str(tmp_path), control=False)
    each = convergence.arms_of(config, False, False, str(tmp_path / "broken.py"))
    with Progress(disable=True) as progress, pytest.raises(SystemExit, match="(?s)the arm liger failed.*broken on purpose"):
        arms.train(each, ["cpu", "cpu"], None, time.monotonic(), progress, lambda parameters: 0)


@pytest.mark.parametrize("order", ["save", "stop"])
def test_an_arm_that_dies_in_the_turn_of_another(monkeypatch, order):
    worker = "from liger_kernel.cli.child import emit; emit(event='ready', step=0); input()"
    monkeypatch.setattr(arms, "Child", lambda command, env: Child([sys.executable, "-c", worker], env))
    with Progress(disable=True) as progress:
        arm = arms.Arm({"arm": "liger", "steps": 1, "folder": ""}, progress)
        arm.wait()
        arm.child.process.kill()
        arm.child.process.wait()
        with pytest.raises(SystemExit, match="the arm liger failed, exit code -9"):
            arm.stop() if order == "stop" else arm.order(order)


def test_a_folder_without_a_step_holds_no_run(given, tmp_path, monkeypatch):
    monkeypatch.setattr(arms, "train", lambda *a: [])  # as of arms that fail before their first step
    for rate in (0.1, 0.2):
        liger(*given, "--out", tmp_path, "--lr", rate, code=1)
    (tmp_path / "liger").mkdir()
    for held in (tmp_path / "liger" / "state.json", tmp_path / "liger.jsonl"):  # of --log-every 100; of --checkpoint none
        held.write_text('{"step": 3}\n')
        assert "lr was 0.2, is 0.3" in liger(*given, "--out", tmp_path, "--lr", 0.3, code=2)
        held.unlink()


def test_settings_of_an_older_version_name_no_digest(tmp_path):
    digests = [{"data": {"kind": "tokens"} | more} for more in ({}, {"digest": "a"}, {"digest": "b"})]
    assert settings.differences(tmp_path / "older", digests[0]) == settings.differences(tmp_path / "older", digests[1]) == []
    assert settings.differences(tmp_path, digests[1]) == [] and "data was" in settings.differences(tmp_path, digests[2])[0]


def test_what_an_earlier_report_still_says(tmp_path):
    assert convergence.earlier(tmp_path, []) == {}
    there = {"patched": {"liger": "all"}, "parameters": 5, "date": "then", "limit": 0.01}
    (tmp_path / "report.json").write_text(json.dumps(there))
    assert convergence.earlier(tmp_path, ["baseline", "liger"]) == {}
    assert convergence.earlier(tmp_path, ["spread"]) == {"patched": {"liger": "all"}}
    assert convergence.earlier(tmp_path, []) == {"patched": {"liger": "all"}, "parameters": 5, "date": "then"}


def test_control_arms_are_equal(given, tmp_path):
    liger(*given, "--out", tmp_path, "--control", "--checkpoint", "none")
    found = json.loads((tmp_path / "report.json").read_text())["found"]
    assert found["differences"]["liger"]["largest_raw"] == 0 and found["sentence"].startswith("PASS")


BROKEN = """
def apply(model):
    model.get_submodule("model.layers.0.mlp").register_forward_hook(lambda module, args, output: output * 3 + 1)
"""


def test_broken_kernel_is_found_and_files_read_back(given, tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    config, _, device, _, batch, _, seq, _, tokens, _, tokenizer, _, text = given
    code = convergence.run(str(config), device, tmp_path / "out", batch=batch, seq=seq, tokens=tokens, data=[text], tokenizer=tokenizer,
                           seed=0, log_every=1, checkpoint="none", precision=None, lr=0.01, hook=str(tmp_path / "broken.py"),
                           json_path=tmp_path / "numbers.json")
    assert code == 1
    text = liger("--from", tmp_path / "numbers.json", "--plots", tmp_path / "drawn", code=1)
    sentence = json.loads((tmp_path / "out" / "report.json").read_text())["found"]["sentence"]
    assert sentence.startswith("FAIL") and sentence in text.replace("\n", " ")
    assert (tmp_path / "drawn" / "loss.png").exists() and (tmp_path / "drawn" / "report.html").exists()


def test_refuses(given, whole, tmp_path):
    out, _ = whole
    other = liger(*given, "--out", out, "--lr", 0.5, code=2)
    assert "holds a run of other settings (lr was" in other and "--fresh" in other
    (tmp_path / "vit.json").write_text('{"model_type": "vit"}')
    (tmp_path / "one.txt").write_text("a")
    (tmp_path / "liger.jsonl").write_text("an old run")
    for arguments, words in (
        (("nothing", "--out", tmp_path, "--fresh"), "is neither one of 100m, "),
        ((tmp_path / "vit.json", "--device", "cpu", "--out", tmp_path), "names no vocab_size"),
        (("tiny", "--device", "cpu", "--out", tmp_path, "--tokenizer", "bytes", "--data", tmp_path / "one.txt", "--fresh"),
         "the text has 2 tokens"),
        (("tiny", "--plots", tmp_path), "--plots belongs to --from"),
        (("tiny", "--precision", "fp8"), "expected fp32 or bf16"),
        (("tiny", "--checkpoint", "some"), "expected full, compact or none"),
        (("tiny", "--synthetic", "--data", "x"), "takes the place of --data"),
        (("tiny", "--device", "cuda:99"), "is not there"),
        (("tiny", "--device", "cpu", "--out", tmp_path, "--tokens", 5), "no more than one step"),
        (("tiny", "--device", "cpu", "--out", tmp_path, "--data", tmp_path / "none", "--fresh"), "is not there"),
        (("tiny", "--device", "cpu", "--out", tmp_path, "--tokenizer", "none"), "expected bytes, bpe or a folder"),
        (("--from", out / "report.json", "--json", "x"), "it has no use for --json"),
    ):
        assert words in liger(*arguments, code=2).replace("\n", " "), arguments
    assert (tmp_path / "liger.jsonl").exists(), "--fresh takes an old run away for one that begins"


class Made:
    """A model and its AdamW, stepped once."""

    def __init__(self, seed, wide=40):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(wide, 30), torch.nn.Linear(30, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.step()

    def step(self):
        self.model(torch.ones(3, self.model[0].in_features)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def numbers(self):
        return [p.detach().clone() for p in self.model.parameters()]


@pytest.mark.parametrize("compact", [False, True])
def test_checkpoint(tmp_path, compact):
    one, other = Made(0), Made(1)
    checkpoint.save(tmp_path, 1, one.model, one.optimizer, compact, part_bytes=6000)
    assert len(list((tmp_path / "step-1").iterdir())) > 1
    (tmp_path / "step-2.part").mkdir()  # as of a save that was interrupted
    assert checkpoint.load(tmp_path, other.model, other.optimizer) == 1
    one.step()
    other.step()
    for a, b in zip(one.numbers(), other.numbers(), strict=True):
        assert torch.equal(a, b) if not compact else torch.allclose(a, b, atol=1e-4)
    checkpoint.save(tmp_path, 2, one.model, one.optimizer)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state.json", "step-2"]
    with pytest.raises(ValueError, match="of another model"):
        checkpoint.load(tmp_path, *vars(Made(0, wide=41)).values())
    (tmp_path / "step-2" / "part-000.pt").unlink()
    with pytest.raises(ValueError, match="is missing"):
        checkpoint.load(tmp_path, other.model, other.optimizer)


def test_log_drops_what_has_no_checkpoint(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    Log(path, 2).write(step=3, loss=1.0)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3] and "loss" in path.read_text()


def test_batches_depend_on_the_step_alone(tmp_path):
    np.arange(100, dtype=np.int32).tofile(tmp_path / "tokens.bin")
    forward, jumping = (data.Tokens(tmp_path / "tokens.bin", 3, 10, 0) for _ in range(2))
    batches = [forward(i) for i in range(8)]
    for i in (7, 2, 5, 0):
        assert np.array_equal(jumping(i), batches[i])
    seen = np.concatenate(batches)[:20, 0]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(0, 100, 10)), "every window once a round"
    assert list(seen[:10]) != list(seen[10:])
    with pytest.raises(ValueError, match="the text has 100 tokens"):
        data.Tokens(tmp_path / "tokens.bin", 1, 101, 0)


def test_synthetic_source():
    source = data.Synthetic(1000, 64, 128, 0)
    batch = source(3)
    assert batch.shape == (64, 128) and batch.min() >= 0 and batch.max() < 1000
    assert np.array_equal(batch, data.Synthetic(1000, 64, 128, 0)(3)) and not np.array_equal(batch, source(4))
    row = batch[:, :-2] % 64 * 64 + batch[:, 1:-1] % 64
    known = (source.rows[row] == batch[:, 2:, None]).any(-1).mean()
    assert 0.88 < known < 0.97 and 2 < source.entropy < np.log(1000) - 1


def test_text_is_read_once(tmp_path):
    (tmp_path / "in").mkdir()
    for name, text in (("b.txt", "two"), ("a.md", "one"), ("c.bin", "no text")):
        (tmp_path / "in" / name).write_text(text)
    made = data.prepare(tmp_path / "out", [str(tmp_path / "in")], "bytes", 300, 1000)
    assert bytes(t for t in np.fromfile(made["path"], np.int32) if t < 256) == b"onetwo" and made["tokens"] == 8
    assert data.prepare(tmp_path / "out", [str(tmp_path / "in")], "bytes", 300, 1000, say=pytest.fail) == made
    facts = next((tmp_path / "out").glob("*.json"))
    facts.write_text(json.dumps({k: v for k, v in json.loads(facts.read_text()).items() if k != "digest"}))  # as of an older version
    assert data.prepare(tmp_path / "out", [str(tmp_path / "in")], "bytes", 300, 1000) == made
    assert json.loads(facts.read_text())["digest"] == made["digest"]
    with pytest.raises(ValueError, match="has 257 entries, the model's vocabulary 256"):
        data.prepare(tmp_path / "out", [str(tmp_path / "in")], "bytes", 256, 1000)


def test_tokenizers(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    (tmp_path / "t.txt").write_text("the cat sat on the mat " * 50)
    made = data.prepare(tmp_path / "bpe", [str(tmp_path / "t.txt")], "bpe", 280, 1000)
    assert made["used"] <= 280 and made["tokens"] < 23 * 50
    trained = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "cat": 1, "?": 2}, unk_token="?"))
    trained.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trained.save(str(tmp_path / "tokenizer.json"))
    made = data.prepare(tmp_path / "own", [str(tmp_path / "t.txt")], str(tmp_path), 300, 1000)
    assert list(np.fromfile(made["path"], np.int32)[:4]) == [0, 1, 2, 2]


def test_whole_steps_of_at_least_the_tokens():
    assert [settings.settings("tiny", "cpu", tokens)["steps"] for tokens in (1025, 2048, 2049)] == [2, 2, 3]


def test_sentence_says_how_far_the_other_seed_went(whole):
    document = json.loads((whole[0] / "report.json").read_text())
    document["arms"]["spread"] = {name: values[:6] for name, values in document["arms"]["spread"].items()}
    assert "another seed's, over 192, by " in report.compare(document)["sentence"]


@pytest.mark.parametrize(("ours", "seeds", "words"), [
    (40, 3, "at any single step; another seed's, over 48, by 0.1 at any single step; not finished"),
    (40, 8, "at any single step; another seed's, over 128, by 0.1 and 0.1; not finished"),
    (1, 0, "PASS: over 16 tokens the loss of the run with the kernels differs by at most 0 relative"),
])
def test_a_report_of_few_steps(tmp_path, ours, seeds, words):
    def log(steps, loss):
        rows = [dict(step=i, tokens=16 * i, loss=loss, grad_norm=1.0, tokens_per_s=1.0, memory_bytes=1e9) for i in range(1, steps + 1)]
        return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}

    settings = dict(name="tiny", precision="fp32", steps=50, batch=1, seq=16, checkpoint="none")
    document = dict(settings=settings, limit=0.01, parameters=None, device="cpu", data="tokens", patched={},
                    arms={"baseline": log(40, 2.0), "liger": log(ours, 2.0), "spread": log(seeds, 2.2)})
    assert convergence.finish(document, tmp_path, None, Console()) == 0
    sentence = json.loads((tmp_path / "report.json").read_text())["found"]["sentence"]
    assert words in sentence and sentence.endswith("without checkpoints the same command begins again.")


def test_the_body_of_100m():
    """At least 100M parameters beside a vocabulary of at least 32 thousand."""
    n = settings.numbers("100m")
    head = n["hidden_size"] // n["num_attention_heads"]
    layer = n["hidden_size"] * (2 * n["hidden_size"] + 2 * head * n["num_key_value_heads"] + 3 * n["intermediate_size"])
    assert n["num_hidden_layers"] * layer >= 100e6 and n["vocab_size"] >= 32000
    config = settings.settings("100m", "cuda:0", None, batch=None)
    assert config["steps"] * config["batch"] * config["seq"] > 0.99e9 and config["precision"] == "bf16"
    rates = [learning_rate(config, step) for step in range(config["steps"])]
    assert max(rates) == pytest.approx(config["lr"]) and rates[-1] == pytest.approx(0.1 * config["lr"], rel=1e-3) and rates[0] > 0


def test_differences():
    one = {"step": [1, 2, 3, 4], "loss": [2.0, 2.0, 2.0, 2.0]}
    other = {"step": [1, 2, 3], "loss": [2.0, 2.1, 2.0]}
    found = report.distance(one, other, 2)
    assert found["largest_raw"] == pytest.approx(0.05) and found["largest_raw_step"] == 2
    assert found["largest_smooth"] == pytest.approx(0.025) and found["smooth_steps"] == [2, 3]
    assert report.distance(one, {"step": [1], "loss": [float("nan")]}, 1)["largest_raw"] == float("inf")
    nan = report.distance(one, {"step": [1, 2, 3], "loss": [2.0, float("nan"), 2.0]}, 1)
    assert nan["largest_smooth"] == float("inf") and nan["smooth"][2] == 0
    tiny = report.distance({"step": [1, 2], "loss": [1e-8, 0.0]}, {"step": [1, 2], "loss": [3e-8, 1e-8]}, 1)
    assert tiny["raw"] == pytest.approx([2e-5, 1e-5]), "relative to 1e-3 nats"
