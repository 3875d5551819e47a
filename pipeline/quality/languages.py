"""Language detection with the optional package `py3langid`.

py3langid is one wheel of 5 MB that needs only NumPy and is released every year. lingua is better on
short texts, but has 96 MB and uses a gigabyte of memory per process. The flag looks at texts of a
paragraph, where both are right.
"""

import importlib.util
from collections.abc import Callable

from pipeline.errors import ConfigError

_PACKAGE = "py3langid"
# Languages that are confused because they are written alike: each group counts as one.
_ALIKE = (("hr", "sr", "bs"), ("id", "ms", "jv"), ("no", "nb", "nn", "da"), ("cs", "sk"))


def check_language_detector() -> None:
    """Raise ConfigError when the package is not installed."""
    if importlib.util.find_spec(_PACKAGE) is None:
        raise ConfigError(
            "quality.wrong_language.enabled: found true, and the package py3langid is not "
            "installed; run `pip install 'py3langid>=0.4,<1'`, or set it to false"
        )


def language_detector() -> Callable[[str], tuple[str, float]]:
    """Load the model; the function returns a text's language code and its probability."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)

    def language_of(text: str) -> tuple[str, float]:
        language, probability = identifier.classify(text)
        group = next((names[0] for names in _ALIKE if language in names), language)
        return group, float(probability)

    return language_of
