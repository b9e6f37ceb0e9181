"""What the README shows runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example)
    result = subprocess.run([sys.executable, "-W", "error", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "torch.Size([2, 4, 1000, 16])" in result.stdout
