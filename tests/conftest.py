"""What holds for every test."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts jobs in the background like that, and every child inherits it: tests that interrupt one would wait.
    signal.signal(signal.SIGINT, signal.default_int_handler)
