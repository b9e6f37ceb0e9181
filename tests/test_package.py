"""`import klformer` is quick, and gives its names when they are used."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

import klformer
from klformer.lab import MODULES


def printed_by(script):
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout


def test_the_import_alone_brings_nothing_heavy():
    heavy = ("torch", "numpy", "matplotlib", "datasets", "tensorboard", "accelerate", "tyro", "rich", "pandas")
    assert printed_by(f"import klformer, sys; print([n for n in {heavy} if n in sys.modules])") == "[]\n"


def test_the_library_needs_torch_safetensors_and_pydantic_alone():
    packages = ("attention", "conversion", "distributed", "kernels", "models", "nn", "ops")
    use = f"import sys, importlib; [importlib.import_module('klformer.' + name) for name in {packages}]"
    use += "; import klformer; klformer.build_attention('gmm-rks', num_heads=2, head_dim=8)"
    assert printed_by(f"{use}; print([n for n in {MODULES} if n in sys.modules and n != 'numpy'])") == "[]\n"


#: One of each thing that the library is for.
USE = """
import torch, klformer
for name in klformer.attention_names():
    attention = klformer.build_attention(name, num_heads=2, head_dim=8, max_len=16)
    q, k, v = torch.randn(3, 1, 2, 16, 8, requires_grad=True)
    attention(q, k, v).sum().backward()
config = klformer.EncoderConfig(model_dim=16, num_layers=2, num_heads=2, attention="gmm-prf")
encoder, x = klformer.TransformerEncoder(config).eval(), torch.randn(1, 30, 16)
streamed = torch.cat(list(encoder.encode_stream(x.split(12, dim=1))), dim=1)
assert torch.allclose(streamed, encoder(x), atol=1e-4)
klformer.KernelState.of(k.detach(), v.detach(), None, feature_map="elu").save("state.safetensors")
klformer.KernelState.load("state.safetensors").read(q)
softmax = klformer.TransformerEncoder(klformer.EncoderConfig(model_dim=16, num_heads=2, attention="softmax"))
batches = [{"x": torch.randn(2, 12, 16)} for _ in range(10)]
settings = klformer.ConversionConfig(steps=2)
conversion = klformer.convert(softmax, batches, attention="atoms-prf:num_frequencies=8", config=settings)
print(conversion.certificate.verdict())
"""


def test_the_library_works_without_the_packages_of_the_others(tmp_path):
    strangers = {*MODULES, "transformers", "sentence_transformers", "onnx", "pandas", "scipy", "hypothesis", "pytest"}
    strangers -= {"numpy"}  # which safetensors saves tensors of torch with
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({strangers}))")
    command = [sys.executable, "-W", "ignore", "-c", USE]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert not done.stderr
    assert "teacher" in done.stdout


@pytest.mark.parametrize("start", [["-m", "klformer", "list"], ["-c", "import klformer; klformer.lab"]])
def test_without_the_extra_one_line_says_how_to_get_it(start, tmp_path):
    blocked = "import sys; sys.modules['rich'] = None"
    (tmp_path / "sitecustomize.py").write_text(blocked)
    command = [sys.executable, *start]
    done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("needs rich: pip install 'klformer[lab]'")
    assert len(done.stderr.splitlines()) == 1 or start[0] == "-c"


def test_the_doctor_works_without_the_extra(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['rich'] = None")
    command = [sys.executable, "-m", "klformer", "doctor", "--help"]
    done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: klformer doctor")


def test_layers_need_torch_and_no_tools():
    tools = ("matplotlib", "datasets", "tensorboard", "accelerate", "tyro", "pandas")
    use = "import sys; from klformer import TransformerEncoder, resample"
    assert printed_by(f"{use}; print([n for n in {tools} if n in sys.modules])") == "[]\n"


@pytest.mark.parametrize("name", klformer.__all__)
def test_every_name_is_that_of_its_module(name):
    assert getattr(klformer, name) is getattr(import_module(klformer._HOMES[name]), name)
    assert name in dir(klformer)


def test_editors_and_mypy_see_the_same_names():
    tree = ast.parse(Path(klformer.__file__).read_text())
    only_for_types = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in only_for_types.body for alias in node.names}
    assert seen == klformer._HOMES
    assert klformer.__all__ == sorted(seen)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'klformer' has no attribute 'attention_nmaes'"):
        klformer.attention_nmaes  # noqa: B018
    assert not hasattr(klformer, "__path_of_nothing__")


def test_packages_are_there_after_the_import():
    script = "import klformer; print(klformer.nn.MultiheadAttention.__name__, klformer.distributed.__name__)"
    assert printed_by(script) == "MultiheadAttention klformer.distributed\n"
    for name in [each.name for each in iter_modules(klformer.__path__) if each.name != "__main__"]:
        assert getattr(klformer, name) is import_module(f"klformer.{name}")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        klformer.nothing  # noqa: B018
