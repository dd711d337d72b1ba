"""A server command that makes its server slower: `slow_proxy.py FACTOR COMMAND... --port N`.

Starts COMMAND on a port of its own and answers on N itself: every byte of an answer leaves FACTOR times as long after
its request as it came. Cadence, first token and throughput all get slower by that factor.
"""

import asyncio
import contextlib
import socket
import subprocess
import sys


async def pump_answers(reader, writer, asked, factor):
    loop, queue = asyncio.get_running_loop(), asyncio.Queue()

    async def read():
        while data := await reader.read(65536):
            queue.put_nowait((loop.time(), data))
        queue.put_nowait((loop.time(), b""))

    task = asyncio.create_task(read())
    while True:
        came, data = await queue.get()
        if not data:
            break
        await asyncio.sleep(max(0.0, asked[0] + factor * (came - asked[0]) - loop.time()))
        writer.write(data)
        await writer.drain()
    writer.close()
    await task


async def serve(port, behind, factor):
    async def connection(reader, writer):
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", behind)
        except OSError:  # not up yet
            writer.close()
            return
        asked = [0.0]
        answers = asyncio.create_task(pump_answers(server_reader, writer, asked, factor))
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                asked[0] = asyncio.get_running_loop().time()
                server_writer.write(data)
                await server_writer.drain()
        server_writer.close()
        with contextlib.suppress(ConnectionError):
            await answers

    async with await asyncio.start_server(connection, "127.0.0.1", port) as server:
        await server.serve_forever()


def main():
    factor, command = float(sys.argv[1]), sys.argv[2:]
    at = command.index("--port") + 1
    port = int(command[at])
    with socket.create_server(("127.0.0.1", 0)) as probe:
        behind = probe.getsockname()[1]
    command[at] = str(behind)
    subprocess.Popen(command)
    asyncio.run(serve(port, behind, factor))


if __name__ == "__main__":
    main()
