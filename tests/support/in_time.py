"""Call functions in threads of their own, and fail where one hangs, which minutes tell from a slow or busy computer."""

import threading

PATIENCE = 300  # seconds


def in_time(*functions, seconds=PATIENCE):
    """What functions return, each in a thread of its own, or the exceptions that they raise."""
    results = [None] * len(functions)

    def run(number):
        try:
            results[number] = functions[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive(), "it hangs"
    return results
