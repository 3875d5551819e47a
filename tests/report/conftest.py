"""A browser for the tests of the pages."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.fakes.browser import NO_BROWSER, chromium, started


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for each module and not for the session: while it runs, no test can use asyncio.run."""
    if chromium() is None:
        pytest.skip(NO_BROWSER)
    with started() as browser:
        yield browser
