"""Which files make a model folder what it is."""

from pathlib import Path

PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")


def model_files(folder: Path) -> list[str]:
    """The files of a Hugging Face or PEFT folder: a change in any of them is another model."""
    return sorted(str(path) for pattern in PATTERNS for path in folder.glob(pattern))
