"""Which language a text is in. The door to `py3langid`, which is optional.

py3langid is one wheel of 5 MB that runs on NumPy alone and is released every year; lingua tells
short texts apart better and takes 96 MB and a gigabyte of memory a process. The flag asks about
texts of a paragraph, where both are right.
"""

import importlib.util
from collections.abc import Callable

from pipeline.errors import ConfigError

_PACKAGE = "py3langid"
# Written alike, and taken for one another: one of the group is as good as another.
_ALIKE = (("hr", "sr", "bs"), ("id", "ms", "jv"), ("no", "nb", "nn", "da"), ("cs", "sk"))


def check_language_detector() -> None:
    """Raises ConfigError when the package is not installed."""
    if importlib.util.find_spec(_PACKAGE) is None:
        raise ConfigError(
            "quality.wrong_language.enabled: found true, and the package py3langid is not "
            "installed; run `pip install 'py3langid>=0.4,<1'`, or set it to false"
        )


def language_detector() -> Callable[[str], tuple[str, float]]:
    """From a text to its language's code and the chance that it is right."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)

    def language_of(text: str) -> tuple[str, float]:
        language, probability = identifier.classify(text)
        group = next((names[0] for names in _ALIKE if language in names), language)
        return group, float(probability)

    return language_of
