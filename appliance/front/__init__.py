"""The front door: the agent's public port and its own socket.

    door.py         FrontDoor: sockets, the thread, the heartbeat, reload, stop
    desk.py         one request from its arrival to its end: guard, limits, queue, relay or own answer
    guard.py        PURE  who may come in: key, Host, Origin
    routes.py       PURE  which paths exist, and which of them reach the worker
    parameters.py   PURE  which parameters of a request are refused
    line.py         seats and the queue before them
    relay.py        one request to the worker's unix socket and its answer back, as it comes
    body.py         a request's body: read, held while it waits, let go as it is sent on
    connection.py   a client's connection: bounded in number and in time
    words.py        PURE  what is answered by the door itself: errors, status words
    certificate.py  TLS context from files, their reload, a certificate's last day

The only part of the agent that knows asyncio and aiohttp. It is imported when the agent starts, never by the command
line. It decides nothing about the worker: the loop publishes on the Board whether requests are let in.
"""
