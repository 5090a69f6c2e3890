"""Ctrl-C and SIGTERM: the first is asked for after a step, the second one leaves at once, whatever the process does."""

import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import hashlib, signal, sys
from jax_fp8.run.leaving import Leaving

before = signal.getsignal(signal.SIGTERM)
try:
    with Leaving() as leaving:
        if sys.argv[1] == "trains":
            with leaving.after_a_step():
                for step in range(1000):
                    print("step", flush=True)
                    hashlib.pbkdf2_hmac("sha256", b"", b"", int(sys.argv[2]))  # Python hears of no signal in here
                    if leaving.is_asked(step):
                        print("asked", leaving.status)
                        break
        else:
            print("step", flush=True)
            while True:
                hashlib.pbkdf2_hmac("sha256", b"", b"", 1000)
except KeyboardInterrupt:
    print("interrupted", leaving.status)
print(signal.getsignal(signal.SIGTERM) == before)
"""


def run(where, rounds, *signals):
    command = [sys.executable, "-c", PROGRAM, where, str(rounds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "step\n"
        for number in signals:
            process.send_signal(number)
            time.sleep(0.2)
        output, said = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, [line for line in output.splitlines() if line not in ("", "step")], said


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_is_asked_for_after_a_step(number, status):
    assert run("trains", 1000, number) == (
        0,
        [f"asked {status}", "True"],
        "\nends after this step; once more, and it ends at once\n",
    )


def test_without_steps_it_interrupts():
    assert run("samples", 0, signal.SIGTERM) == (0, ["interrupted 143", "True"], "")


def test_the_second_signal_leaves_at_once():
    """While the first is still unheard, in a call that would last for minutes."""
    began = time.monotonic()
    code, output, said = run("trains", 10**9, signal.SIGTERM, signal.SIGINT)
    assert (code, output) == (130, []) and said.startswith("\nends after this step")
    assert time.monotonic() - began < 30


def test_a_run_that_failed_waits_for_no_thread():
    program = (
        "import sys, threading, time\nfrom jax_fp8.run.leaving import leave\n"
        "threading.Thread(target=time.sleep, args=(float(sys.argv[2]),)).start()\n"
        "print('said'); leave(int(sys.argv[1]))"
    )

    def seconds(status, sleeps):
        began = time.monotonic()
        command = [sys.executable, "-c", program, str(status), str(sleeps)]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (finished.returncode, finished.stdout, finished.stderr) == (status, "said\n", "")
        return time.monotonic() - began

    assert seconds(1, 60) < 30
    assert seconds(2, 1) >= 1  # negative control
