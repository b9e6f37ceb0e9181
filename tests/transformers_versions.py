"""Run the tests of conversions with several versions of transformers, each in packages of its own.

    python tests/transformers_versions.py 5.20.2 5.21.1 5.22.2 5.23.0

Each version is installed with what it needs into a folder that stands before all other packages; torch and the rest
are those of this Python. The extra `hf` in pyproject.toml names the versions that pass. Exits with 1 if one fails.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ["tests/conversion", "tests/lab/cli/test_encoder.py"]


def run_tests(version: str, packages: Path, tests: list[str]) -> bool:
    """Install a version and run the tests with it; whether they pass."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(packages), f"transformers=={version}"]
    if not (packages / "transformers").exists():
        subprocess.run(install, check=True)
    environment = {**os.environ, "PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"}
    check = "import transformers; print(transformers.__version__, end='')"
    found = subprocess.run([sys.executable, "-c", check], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == version, f"transformers {found.stdout} stands before {version}"
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], cwd=ROOT, env=environment, check=False)
    return done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", help="of transformers")
    parser.add_argument("--packages", type=Path, help="folder to install to, and to find them in again")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files or folders of tests, in place of all")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = given.packages or Path(scratch)
        passed = {version: run_tests(version, place / version, given.tests) for version in given.versions}
    for version, good in passed.items():
        print(f"transformers {version}: {'passed' if good else 'FAILED'}")
    raise SystemExit(0 if all(passed.values()) else 1)


if __name__ == "__main__":
    main()
