"""The package as others get it: a wheel that installs in an environment of its own, with all that it needs inside."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

import klformer

ROOT = Path(__file__).parent.parent


def test_one_version_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert klformer.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest is not None
    assert newest[1] == version


@pytest.mark.slow
def test_a_wheel_is_built_installed_and_runs(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(ROOT / "klformer", source / "klformer", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    build = ["wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run([*pip, *build], check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob("klformer-*.whl")

    home = tmp_path / "environment"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    install = ["--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*pip, *install], check=True, capture_output=True, text=True)
    # What klformer depends on, as it is here, without the klformer that is installed here for development.
    (site,) = home.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")

    def said(*command):
        done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert said(home / "bin" / "klformer", "--version") == f"klformer {klformer.__version__}\n"
    listed = said(home / "bin" / "klformer", "list")
    assert all(name in listed for name in ("gmm-rks", "softmax", "listops"))
    # Files that are not Python, each of which somebody reads.
    parts = {"py.typed", "lab/report/template.html.j2", "lab/report/certificate.html.j2"}
    parts |= {"lab/analysis/measured.json", "lab/analysis/times.json"}
    assert parts <= {str(path.relative_to(site / "klformer")) for path in (site / "klformer").rglob("*.*")}
    assert {path.name for path in site.iterdir()} == {
        "klformer",
        f"klformer-{klformer.__version__}.dist-info",
        "dependencies.pth",
    }
