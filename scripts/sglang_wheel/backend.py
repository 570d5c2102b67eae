"""Build backend for one package: SGLang's own wheel, with its dependencies moved into the extra `cuda`.

SGLang requires over 10 GB of CUDA packages that its CPU engine never imports, and a requirements file cannot say
`--no-deps` for one line. `./scripts/sglang_wheel` in requirements.txt installs the unchanged code without them (the few
that a CPU needs are listed there by name); `./scripts/sglang_wheel[cuda]` in requirements-gpu.txt brings them all.
"""

import base64
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

SGLANG = "sglang==0.5.15.post1"
EXTRA = "cuda"


def build_wheel(
    wheel_directory: str, config_settings: dict | None = None, metadata_directory: str | None = None
) -> str:
    """PEP 517 hook: download SGLang's wheel with pip, write the changed copy to `wheel_directory`, return its name."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--dest", folder, SGLANG], check=True)
        (source,) = Path(folder).glob("*.whl")
        _copy_wheel(source, Path(wheel_directory, source.name))
        return source.name


def _copy_wheel(source: Path, target: Path) -> None:
    info = "-".join(source.name.split("-")[:2]) + ".dist-info/"
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new:
        metadata = dependencies_to_extra(old.read(info + "METADATA").decode()).encode()
        digest = base64.urlsafe_b64encode(hashlib.sha256(metadata).digest()).rstrip(b"=").decode()
        lines = old.read(info + "RECORD").decode().splitlines()
        record = [line for line in lines if not line.startswith(info + "METADATA,")]
        record.append(f"{info}METADATA,sha256={digest},{len(metadata)}")
        changed = {info + "METADATA": metadata, info + "RECORD": ("\n".join(record) + "\n").encode()}
        for item in old.infolist():
            new.writestr(item, changed.get(item.filename) or old.read(item))


def dependencies_to_extra(metadata: str) -> str:
    """Return wheel METADATA in which each unconditional dependency is needed only with the extra `cuda`."""
    header, blank, description = metadata.partition("\n\n")
    lines = []
    for line in header.split("\n"):
        if line.startswith("Requires-Dist:") and "extra ==" not in line:
            requirement, _, marker = line.partition(";")
            condition = f'({marker.strip()}) and extra == "{EXTRA}"' if marker else f'extra == "{EXTRA}"'
            line = f"{requirement.rstrip()} ; {condition}"
        lines.append(line)
    lines.append(f"Provides-Extra: {EXTRA}")
    return "\n".join(lines) + blank + description
