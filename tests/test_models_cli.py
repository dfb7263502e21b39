"""`liger models`: the table, the file and the exit codes."""

import json

import pytest

pytest.importorskip("rich")
from liger_kernel.cli import models


def test_table_and_file(capsys, tmp_path, monkeypatch):
    """Every number of the table is in the file; nothing stays patched."""
    from transformers.models.gpt_oss import modeling_gpt_oss

    monkeypatch.setenv("COLUMNS", "240")
    before = modeling_gpt_oss.apply_rotary_pos_emb
    assert models.run(["llama", "gpt_oss"], "cpu", tmp_path / "models.json") == 0
    text = capsys.readouterr().out
    for words in ("llama.lce_forward", "5 LigerRMSNorm", "2 LigerSwiGLUMLP", "liger_rotary_pos_emb_gpt_oss", "GptOssExperts: "):
        assert words in text
    llama, gpt_oss = json.loads((tmp_path / "models.json").read_text())["models"]
    assert llama["model_type"] == "llama" and not llama["left"] and len(llama["replaced"]) == 9
    assert all(set(llama[k]) == {"logits", "loss", "gradients"} for k in ("fp32", "bf16", "bf16_unpatched"))
    assert max(gpt_oss["fp32"].values()) < 1e-5
    assert modeling_gpt_oss.apply_rotary_pos_emb is before


def test_failures(capsys, monkeypatch):
    """An unknown type is 2; a type that transformers lacks, or one that moves too far, is 1 and named."""
    monkeypatch.setenv("COLUMNS", "240")
    assert models.run(["no_such_model"]) == 2
    assert "no row for no_such_model" in capsys.readouterr().out

    def missing(model_type, device):
        raise ImportError("no module of that name")

    from liger_kernel.patch import compare

    real = compare.compare
    monkeypatch.setattr(compare, "compare", missing)
    assert models.run(["llama"]) == 1
    assert "no module of that name" in capsys.readouterr().out

    def moved(model_type, device):
        report, exact, *others = real(model_type, device)
        return report, compare.Distance(0.0, 1e-2, 0.0), *others

    monkeypatch.setattr(compare, "compare", moved)
    assert models.run(["llama"]) == 1
    assert "failed: llama" in capsys.readouterr().out


def test_all_types(capsys, monkeypatch):
    """Without a type, each that a trainer may ask for has a line."""
    from liger_kernel.patch import compare
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    monkeypatch.setenv("COLUMNS", "240")
    measured = compare.compare("llama")
    monkeypatch.setattr(compare, "compare", lambda model_type, device: measured)
    assert models.run([]) == 0
    lines = capsys.readouterr().out.split()
    assert not set(MODEL_TYPE_TO_APPLY_LIGER_FN) - set(lines)
