"""Many requests at the same moment from a process of its own: `python crowd.py PORT COUNT BODY`.

Prints a JSON list of {status, seconds, retry_after, code}; `seconds` from the first byte sent to the whole answer.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time


async def ask(port: int, body: bytes, start: asyncio.Event) -> dict[str, object]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await start.wait()
    began = time.monotonic()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
                 b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    answer = await reader.read()
    seconds = time.monotonic() - began
    writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
    status = int(head.split(b" ", 2)[1])
    code = json.loads(rest)["error"]["code"] if status >= 400 else None
    return {"status": status, "seconds": seconds, "retry_after": headers.get("Retry-After"), "code": code}


async def main(port: int, count: int, body: bytes) -> None:
    start = asyncio.Event()
    asking = [asyncio.create_task(ask(port, body, start)) for _ in range(count)]
    await asyncio.sleep(0.5)  # all are connected
    start.set()
    print(json.dumps(await asyncio.gather(*asking)))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].encode()))
