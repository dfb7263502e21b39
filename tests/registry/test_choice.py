"""Choosing an implementation: LIGER_KERNEL_IMPL at import, liger_kernel.backends at the call."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

import liger_kernel.functional as F
from liger_kernel import backends
from liger_kernel.backends import registry
from liger_kernel.ops import backends as imports
from liger_kernel.ops.backends.registry import IMPL_REGISTRY, ImplInfo, load_selected, select_impl

VARIABLES = ("LIGER_KERNEL_IMPL", "LIGER_KERNEL_BACKEND", "LIGER_KERNEL_IMPL_RMS_NORM", "LIGER_KERNEL_BACKEND_RMS_NORM")
ACCEPTED = ("cuda", "cpu", "triton", "cutile", "cutedsl", "cute", "nvidia-triton", "nvidia-cutile", "nvidia-cutedsl", " CuTile ", "")


def python(code, **environment):
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False,
                          env={**os.environ, **environment})


def rms_norm(**how):
    return F.rms_norm(torch.ones(2, 8), torch.ones(8), **how)


# --- at import ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_names(name, monkeypatch):
    """None of them breaks an import."""
    monkeypatch.setenv("LIGER_KERNEL_IMPL", name)
    load_selected()


@pytest.mark.parametrize("name", ["cutile", "nvidia-cutedsl", "triton", "", "cuda"])
def test_import_under_an_accepted_name(name):
    """The module of an alias is loaded when, and only when, it is selected, as axolotl asks."""
    run = python("""
        import sys
        import liger_kernel.transformers
        from liger_kernel.ops.backends.registry import IMPL_REGISTRY
        print([name for name, info in IMPL_REGISTRY.items() if info.module_path in sys.modules])
        assert "torch" not in sys.modules or not sys.modules["torch"].cuda.is_initialized()
    """, LIGER_KERNEL_IMPL=name)
    assert run.returncode == 0, run.stderr
    short = name.removeprefix("nvidia-")
    assert run.stdout.strip() == str([short] if short in IMPL_REGISTRY else [])


@pytest.mark.parametrize("name", ["ascend", "ascend-triton", "eager", "cutlass"])
def test_unknown_names(name, monkeypatch):
    monkeypatch.setenv("LIGER_KERNEL_IMPL", name)
    with pytest.raises(RuntimeError, match=f"LIGER_KERNEL_IMPL: unknown implementation '{name}', expected one of") as error:
        load_selected()
    assert ("NPU" in str(error.value)) == ("ascend" in name)


def test_an_unknown_name_does_not_import():
    run = python("import liger_kernel.ops", LIGER_KERNEL_IMPL="eager")
    assert run.returncode and "RuntimeError: LIGER_KERNEL_IMPL: unknown implementation 'eager'" in run.stderr
    assert python("import liger_kernel.ops", LIGER_KERNEL_BACKEND="eager", LIGER_KERNEL_IMPL_RMS_NORM="eager").returncode == 0


def test_select_impl():
    assert imports.LIGER_KERNEL_IMPL_ENV == "LIGER_KERNEL_IMPL" and {"cutile", "cutedsl", "cute"} <= set(IMPL_REGISTRY)
    for device in ("cuda", "cpu", "npu"):
        assert select_impl(device) is None and select_impl(device, " ") is None
    assert select_impl("cuda", "CuTile ") is IMPL_REGISTRY["cutile"] is select_impl("cpu", "nvidia-cutile")
    assert select_impl("cpu", "cpu") is None and select_impl("cuda", "triton") is None
    for device, name, text in (("cpu", "cuda", "runs on cuda, not on 'cpu'"), ("npu", "cutile", "not on 'npu'"), ("cpu", "x", "unknown")):
        with pytest.raises(RuntimeError, match=text):
            select_impl(device, name)


def test_register_impl_info():
    info = ImplInfo("mine", ("xpu",), ("xpu",), "some.module")
    imports.register_impl(info)
    try:
        assert select_impl("xpu") is info and select_impl("xpu", "mine") is info and select_impl("cuda") is None
    finally:
        del IMPL_REGISTRY["mine"]
    with pytest.raises(AttributeError):
        info.name = "other"
    for arguments, text in (((("n", ())), "devices is empty"), (("n", ("cpu",)), "module_path is empty"),
                            (("n", ("cpu",), ("cuda",), "m"), "not all among")):
        with pytest.raises(ValueError, match=text):
            ImplInfo(*arguments)


# --- at the call ----------------------------------------------------------------------------------------------------------------


def test_what_is_there():
    both = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    assert backends.available_impls("rms_norm") == both and backends.all_impls("rms_norm") == ["cpu", "cuda"]
    assert backends.available_impls("rms_norm", "cpu") == backends.available_impls("rms_norm", torch.device("cpu")) == ["cpu"]
    assert backends.available_impls("nothing") == backends.all_impls("nothing") == []
    if torch.cuda.is_available():
        assert backends.available_impls("rms_norm", 0) == ["cuda"]
    assert backends.registry.get_registered("jsd", "cpu").op_name == "jsd" and backends.registry.get_registered("jsd", "x") is None
    assert [i.impl_name for i in backends.registry.list_registered("rope")] == ["cpu", "cuda"]
    backends.clear_available_cache()


def test_root_names():
    import liger_kernel

    for name in ("available_impls", "get_impl", "set_impl", "available_backends", "get_backend", "set_backend"):
        assert getattr(liger_kernel, name) is getattr(backends, name) and name in liger_kernel.__all__
    with pytest.raises(AttributeError, match="nothing"):
        liger_kernel.nothing  # noqa: B018
    run = python("import sys, liger_kernel; assert 'torch' not in sys.modules")
    assert run.returncode == 0, run.stderr


def test_old_spellings():
    pairs = {"register_op": "register_impl", "set_backend": "set_impl", "get_backend": "get_impl", "available_backends": "available_impls",
             "all_backends": "all_impls", "resolve_backend": "resolve_impl", "BackendNotAvailableError": "ImplNotAvailableError",
             "NoBackendAvailableError": "NoImplAvailableError", "LigerBackendFallbackWarning": "LigerImplFallbackWarning"}
    assert all(getattr(backends, old) is getattr(backends, new) for old, new in pairs.items())
    assert issubclass(backends.ImplNotAvailableError, RuntimeError) and issubclass(backends.NoImplAvailableError, RuntimeError)
    assert issubclass(backends.LigerImplFallbackWarning, UserWarning)
    import liger_kernel.backends.dispatch

    assert callable(backends.dispatch) and "liger_kernel.backends.dispatch" in sys.modules
    assert liger_kernel.backends.dispatch is backends.dispatch


def test_set_impl_is_judged_at_the_call():
    assert backends.get_impl() is None
    for name, stored in (("cutile", "nvidia-cutile"), ("triton", "nvidia-triton"), ("cpu", "cpu"), ("eager", "eager")):
        backends.set_impl(name)
        assert backends.get_impl() == stored
    with pytest.raises(backends.ImplNotAvailableError, match="set_impl asks for 'eager'; registered are cpu, cuda"):
        rms_norm()
    backends.set_impl(None)
    assert rms_norm().shape == (2, 8)


@pytest.mark.parametrize("name", [n for n in ACCEPTED if n != "cuda"])
@pytest.mark.parametrize("variable", VARIABLES)
def test_accepted_names_in_every_variable(variable, name, monkeypatch):
    monkeypatch.setenv(variable, name)
    assert rms_norm().shape == (2, 8)
    assert backends.resolve_impl("rms_norm", device="cpu").impl_name == "cpu"


def test_order_of_the_sources(monkeypatch):
    """The call, the op's variables, the general ones, set_impl, the rank. Each name here is refused with its source."""
    def source():
        with pytest.raises(backends.ImplNotAvailableError) as error:
            rms_norm()
        return str(error.value).split()[1]

    backends.set_impl("x")
    assert source() == "set_impl"
    for variable in reversed((*VARIABLES[2:], *VARIABLES[:2])):
        monkeypatch.setenv(variable, "x")
        assert source() == variable
    assert rms_norm(impl="cpu").shape == rms_norm(backend="cpu").shape == rms_norm(impl="cpu", backend="x").shape == (2, 8)
    monkeypatch.setenv("LIGER_KERNEL_IMPL_RMS_NORM", "")
    assert source() == "LIGER_KERNEL_BACKEND_RMS_NORM"


def test_registered_implementations(monkeypatch):
    calls = []

    @backends.register_impl("rms_norm", impl_name="mine", preference_rank=60, modes=("a",), default_mode="a")
    def mine(*args, mode=None):
        calls.append((args[2:], mode))
        return args[0] * 2

    assert callable(mine) and backends.available_impls("rms_norm", "cpu") == ["cpu", "mine"]
    rms_norm()
    assert not calls
    assert (rms_norm(impl="mine", offset=1.0) == 2).all() and calls == [((1e-6, 1.0, "llama", False, None), "a")]
    rms_norm(impl="mine", mode="other")
    assert calls[-1][1] == "other"
    backends.register_impl("rms_norm", backend="mine", preference_rank=10)(mine)
    assert (rms_norm() == 2).all()
    backends.register_impl("rms_norm", impl_name="nvidia-cutile", preference_rank=70)(lambda *args: args[0] * 3)
    assert (rms_norm(impl="cutile") == 3).all() and (rms_norm(impl="triton") < 1.1).all()
    assert backends.resolve_impl("rms_norm", "mine").backend == "mine"
    for arguments, what, text in (({}, mine, "impl_name is missing"), ({"impl_name": "n"}, 3, "expected a function or a class")):
        with pytest.raises(TypeError, match=text):
            backends.register_impl("rms_norm", **arguments)(what)


def test_registered_autograd_function():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            return dy * 2

    assert backends.register_impl("double", impl_name="mine", default_mode="default")(Double) is Double
    x = torch.ones(2, requires_grad=True)
    assert (backends.dispatch("double", x, mode="anything") == 2).all()
    implementation = backends.resolve_impl("double")
    assert implementation.autograd_function is Double and (implementation.call(x) == 2).all()
    with pytest.raises(TypeError, match="takes no keywords, got scale"):
        implementation.call(x, scale=3)
    with pytest.raises(backends.ImplNotAvailableError, match="double: impl asks for 'triton'; registered are mine"):
        backends.dispatch("double", x, impl="triton")


def test_capability():
    met = backends.Capability()
    assert met.is_satisfied() and met.reason_if_unsatisfied("cpu") is None
    for capability, text in ((backends.Capability(requires_cuda=True), "needs CUDA"), (backends.Capability(min_cc=(9, 0)), "needs CUDA"),
                             (backends.Capability(modules=["no_such_package"]), "no_such_package"),
                             (backends.Capability(predicate=lambda: False), "does not run on cpu"),
                             (backends.Capability(predicate=lambda device: device.type == "xpu"), "does not run on cpu")):
        assert not capability.is_satisfied("cpu") and text in capability.reason_if_unsatisfied("cpu")
    with pytest.raises(backends.NoImplAvailableError, match="softcap: no implementation runs on cpu; registered: mine"):
        backends.register_impl("softcap", impl_name="mine", capability=backends.Capability(requires_cuda=True))(abs)
        backends.dispatch("softcap", torch.ones(2))
    with pytest.raises(backends.NoImplAvailableError, match="registered: none"):
        backends.resolve_impl("no_such_op", device="cpu")


def test_compute_capabilities(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert backends.Capability(min_cc=(9, 0), max_cc=(9, 0)).is_satisfied("cuda:0")
    assert "(9, 0) is not within" in backends.Capability(min_cc=(10, 0)).reason_if_unsatisfied(0)
    assert not backends.Capability(max_cc=(8, 9)).is_satisfied("cuda:0")


def test_declared_locations(tmp_path, monkeypatch):
    (tmp_path / "gives_an_op.py").write_text(
        "from liger_kernel.backends import register_impl\nregister_impl('late_op', impl_name='late')(abs)\n")
    (tmp_path / "broken_op.py").write_text("raise OSError('no driver')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.declare_op_locations("late_op", ["gives_an_op", "broken_op"])
    assert "gives_an_op" not in sys.modules
    assert backends.all_impls("late_op") == ["late"] and "late_op" in registry.all_registered_ops()
    assert "no driver" in registry.get_discovery_failures()["broken_op"]


def test_aliases_are_told_to_the_log(caplog):
    caplog.set_level("DEBUG", "liger_kernel.backends.dispatch")
    rms_norm(impl="cutile")
    assert [r.getMessage() for r in caplog.records] == ["rms_norm: impl=cutile means cpu"]
