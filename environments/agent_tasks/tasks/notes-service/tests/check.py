"""Send series of requests to /app/service.py, each in a process of its own."""

import json
import stat
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from isolated import run_program

SERVICE = Path("/app/service.py")
MAX_BYTES = 100_000
CLIENT = """
import io
import service

result = []
for method, path, query, text in data:
    body = text.encode("utf-8")
    started = []
    environ = {
        "REQUEST_METHOD": method, "SCRIPT_NAME": "", "PATH_INFO": path, "QUERY_STRING": query,
        "SERVER_NAME": "localhost", "SERVER_PORT": "80", "SERVER_PROTOCOL": "HTTP/1.1",
        "wsgi.version": (1, 0), "wsgi.url_scheme": "http", "wsgi.input": io.BytesIO(body),
        "wsgi.errors": io.StringIO(), "wsgi.multithread": False, "wsgi.multiprocess": False,
        "wsgi.run_once": False,
    }
    if body:
        environ |= {"CONTENT_LENGTH": str(len(body)), "CONTENT_TYPE": "application/json"}
    try:
        parts = service.app(environ, lambda *words: started.append(words))
        content = b"".join(parts).decode("utf-8")
        headers = {name.lower(): value for name, value in started[-1][1]}
        result.append([started[-1][0], headers, content])
    except Exception:
        result.append(None)
"""
NOT_FOUND = (404, {"error": "not found"})
NOT_ALLOWED = (405, {"error": "not allowed"})
BAD = (400, {"error": "bad request"})


def note(number, title, *tags):
    return {"id": number, "title": title, "tags": list(tags)}


def page(notes, total):
    return 200, {"notes": notes, "total": total}


def post(title, *tags):
    return "POST", "/notes", "", json.dumps({"title": title, "tags": list(tags)})


def get(path="/notes", query=""):
    return "GET", path, query, ""


def delete(number):
    return "DELETE", f"/notes/{number}", "", ""


def made(*titles):
    return [(post(title), (201, note(n, title))) for n, title in enumerate(titles, 1)]


SERIES = {
    "make and read": [
        (post("Milk", "shop"), (201, note(1, "Milk", "shop"))),
        (post("Call"), (201, note(2, "Call"))),
        (get("/notes/2"), (200, note(2, "Call"))),
        (get("/notes/1"), (200, note(1, "Milk", "shop"))),
        (get("/other"), NOT_FOUND),
    ],
    "pages": [
        *made("a", "b", "c", "d", "e", "f", "g"),
        (get(), page([note(1, "a"), note(2, "b"), note(3, "c")], 7)),
        (get(query="page=2"), page([note(4, "d"), note(5, "e"), note(6, "f")], 7)),
        (get(query="page=3"), page([note(7, "g")], 7)),
        (get(query="page=4"), page([], 7)),
    ],
    "tags": [
        *((post(f"n{n}", *(["x"] if n % 2 else ["y", "z"])), None) for n in range(1, 10)),
        (get(query="tag=x"), page([note(n, f"n{n}", "x") for n in (1, 3, 5)], 5)),
        (get(query="page=2&tag=x"), page([note(n, f"n{n}", "x") for n in (7, 9)], 5)),
        (get(query="tag=z&page=2"), page([note(8, "n8", "y", "z")], 4)),
        (get(query="tag=q"), page([], 0)),
    ],
    "unknown notes": [
        (get("/notes/1"), NOT_FOUND),
        (get("/notes/one"), NOT_FOUND),
        (delete(3), NOT_FOUND),
        (get("/notes/"), NOT_FOUND),
        (get("/notes/1/2"), NOT_FOUND),
        (get("/"), NOT_FOUND),
    ],
    "deletion": [
        *made("a", "b"),
        (delete(1), (204, None)),
        (get("/notes/1"), NOT_FOUND),
        (delete(1), NOT_FOUND),
        (get("/notes/2"), (200, note(2, "b"))),
    ],
    "ids after a deletion": [
        *made("a", "b", "c"),
        (delete(3), (204, None)),
        (delete(1), (204, None)),
        (post("d"), (201, note(4, "d"))),
        (get(), page([note(2, "b"), note(4, "d")], 2)),
    ],
    "characters of several bytes": [
        (post("Käse €3", "süß"), (201, note(1, "Käse €3", "süß"))),
        (get("/notes/1"), (200, note(1, "Käse €3", "süß"))),
        (get(query="tag=s%C3%BC%C3%9F"), page([note(1, "Käse €3", "süß")], 1)),
    ],
    "wrong bodies": [
        *((("POST", "/notes", "", text), BAD) for text in (
            "", "{", "[]", '"a"', "{}", '{"title": ""}', '{"title": "  "}', '{"title": 5}',
            '{"title": "a", "tags": "b"}', '{"title": "a", "tags": [1]}', '{"title": null}',
        )),
        (post("first"), (201, note(1, "first"))),
    ],
    "wrong pages": [
        (post("a"), (201, note(1, "a"))),
        *((get(query=f"page={text}"), BAD) for text in ("0", "-1", "two", "1.5")),
        (get(query="page=1"), page([note(1, "a")], 1)),
    ],
    "other methods": [
        (post("a"), (201, note(1, "a"))),
        (("PUT", "/notes/1", "", "{}"), NOT_ALLOWED),
        (("DELETE", "/notes", "", ""), NOT_ALLOWED),
        (("PATCH", "/notes", "", "{}"), NOT_ALLOWED),
        (("POST", "/notes/1", "", '{"title": "b"}'), NOT_ALLOWED),
        (("PUT", "/other", "", "{}"), NOT_FOUND),
        (get("/notes/1"), (200, note(1, "a"))),
    ],
}  # fmt: skip
AT_START = ("make and read",)


def is_right(response, expected):
    if expected is None:
        return response is not None
    code, value = expected
    if response is None or response[0].split(" ")[0] != str(code):
        return False
    _, headers, content = response
    if code == 204:
        return content == "" and "content-type" not in headers
    try:
        is_same = json.loads(content) == value
    except (ValueError, RecursionError):
        return False
    kind = headers.get("content-type", "").replace(" ", "").lower()
    length = headers.get("content-length")
    is_right_size = length == str(len(content.encode("utf-8")))
    return is_same and is_right_size and kind == "application/json;charset=utf-8"


def passes(source, series):
    responses = run_program(CLIENT, {"service": source}, [request for request, _ in series])
    if not isinstance(responses, list) or len(responses) != len(series):
        return False
    try:
        pairs = zip(responses, series, strict=True)
        return all(is_right(response, expected) for response, (_, expected) in pairs)
    except (AttributeError, TypeError, ValueError, IndexError):
        return False


source = ""
try:
    if stat.S_ISREG(SERVICE.lstat().st_mode) and SERVICE.stat().st_size <= MAX_BYTES:
        source = SERVICE.read_text("utf-8")
except (OSError, ValueError) as error:
    print(f"{SERVICE} cannot be read: {error}")
passed = [name for name, series in SERIES.items() if passes(source, series)]
print(f"passed: {', '.join(passed) or 'no series'}")
gained = [name for name in passed if name not in AT_START]
reward = len(gained) / (len(SERIES) - len(AT_START)) if {*AT_START} <= {*passed} else 0.0
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward}))
