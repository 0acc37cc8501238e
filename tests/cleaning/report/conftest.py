"""One Chromium for all tests of the report, and one page that most of them open."""

import browsing

browser, file, opened = browsing.browser, browsing.file, browsing.opened
