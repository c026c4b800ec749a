"""launch/requirements.lock; .ci/run runs launch/setup.sh itself."""
import re
import tomllib

from tests.helpers.trainer import ROOT


def test_the_lock_has_every_package():
    """launch/requirements.lock names what an environment of the suite has, at one version for each Python."""
    names = [re.match("[a-z0-9-]+(?===)", line)[0] for line in (ROOT / "launch" / "requirements.lock").read_text().splitlines()
             if not line.startswith("#")]
    direct = [re.match("[a-z0-9-]+", line)[0] for line in (ROOT / "requirements.txt").read_text().splitlines()
              if not line.startswith("#")]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    direct += [re.match("[a-z0-9-]+", line)[0] for lines in extras.values() for line in lines]
    assert set(direct) - set(names) == {"torch", "flat-trainers", "bitsandbytes", "vllm", "speechmos", "onnxruntime"}
    assert not [name for name in names if name.startswith(("torch-", "nvidia", "triton"))]
