#!/usr/bin/env python3
"""Broken model files: runs mutants of the tiny fixtures through the commands that read them.

    tests/fuzz.py BINARY SECONDS [SEED]

A command may accept or refuse a mutant: exit code 0, 1 or 64. A signal, a panic, more than 20 s of CPU time
or more than 3 GB is a finding. The mutant's file is then kept and its path printed. Half of the time goes to
seed 1, half to SEED (default: the clock).
"""
import glob, os, random, resource, shutil, struct, subprocess, sys, tempfile, threading, time

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
TIME, MEMORY = 20, 3 << 20  # seconds; KiB
# GGUF value types. 8 is a string, 9 an array.
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
EDGES = [0, 1, 2, 3, 7, 16, 31, 33, 64, 127, 255, 256, 1023, 4096, 16385, 65535, 65536, 1 << 20, (1 << 24) + 1, 1 << 30, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 53,
         (1 << 60) + 1, 1 << 61, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 2, (1 << 64) - 1]
FLOATS = [0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), float("-inf"), 1e-45, 3e38, -3e38, 1e-10, 1e10]
WORDS = [b"", b"\xff\xfe", b"x" * 100000, b"llama", b"bert", b"gpt2", b"gemma4", b"granitehybrid", b"yarn", b"none", b"../../etc/passwd", b"a\0b"]


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, form):
        value = struct.unpack_from("<" + form, self.data, self.at)[0]
        self.at += struct.calcsize(form)
        return value

    def text(self):
        length = self.take("Q")
        self.at += length
        return self.data[self.at - length:self.at]

    def value(self, kind):
        if kind == STRING: return self.text()
        if kind != ARRAY: return self.take(FORMATS[kind])
        inner = self.take("I")
        return [inner, [self.value(inner) for _ in range(self.take("Q"))]]


class File:
    """A GGUF file that can be written with invalid contents."""

    def __init__(self, data):
        r = Reader(data)
        self.magic, self.version = r.take("I"), r.take("I")
        tensors, entries = r.take("Q"), r.take("Q")
        self.entries = []
        for _ in range(entries):
            key = r.text()
            kind = r.take("I")
            self.entries.append([key, kind, r.value(kind)])
        self.tensors = [[r.text(), [r.take("Q") for _ in range(r.take("I"))], r.take("I"), r.take("Q")] for _ in range(tensors)]
        self.head = r.at + -r.at % 32
        self.weights = bytearray(data[self.head:])
        # Wrong counts and lengths to write into the header. None: the right ones.
        self.counts = [None, None]
        self.lengths = {}

    def entry(self, key):
        return next((entry for entry in self.entries if entry[0] == key), None)

    def set(self, key, kind, value):
        entry = self.entry(key)
        if entry: entry[1:] = [kind, value]
        else: self.entries.append([key, kind, value])

    def written(self, kind, value, key=None):
        if kind == STRING: return struct.pack("<Q", self.lengths.get(key, len(value))) + value
        if kind == ARRAY: return struct.pack("<IQ", value[0], self.lengths.get(key, len(value[1]))) + b"".join(self.written(value[0], v) for v in value[1])
        if kind not in FORMATS: return b"\0" * 8
        form = FORMATS[kind]
        if form in "fd":
            try: return struct.pack("<" + form, value)
            except OverflowError: return struct.pack("<" + form, float("inf"))
        size = struct.calcsize(form)
        return (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")

    def bytes(self):
        head = struct.pack("<IIQQ", self.magic, self.version, *(len(real) if said is None else said for said, real in zip(self.counts, (self.tensors, self.entries))))
        for key, kind, value in self.entries:
            head += self.written(STRING, key) + struct.pack("<I", kind) + self.written(kind, value, key)
        for name, shape, kind, offset in self.tensors:
            head += self.written(STRING, name) + struct.pack("<I", len(shape)) + struct.pack("<%dQ" % len(shape), *shape) + struct.pack("<IQ", kind, offset)
        return head + b"\0" * (-len(head) % 32) + bytes(self.weights)


def raw(r, data, file):
    """Changes arbitrary bytes of the header."""
    data = bytearray(data)
    for _ in range(r.choice([1, 1, 2, 8])):
        at, how = r.randrange(file.head), r.randrange(5)
        if how == 0: data[at] ^= 1 << r.randrange(8)
        elif how == 1: data[at:at + 8] = struct.pack("<Q", r.choice(EDGES))
        elif how == 2: del data[at:at + r.randrange(1, 64)]
        elif how == 3: data[at:at] = r.randbytes(r.randrange(1, 64))
        else: data[at:at + 4] = struct.pack("<I", r.choice(EDGES) & 0xffffffff)
    return bytes(data)


def cut(r, data, file):
    return data[:r.choice([r.randrange(32), r.randrange(file.head), file.head, r.randrange(len(data)), len(data) - r.randrange(1, 40)])]


def header(r, data, file):
    how = r.randrange(4)
    if how == 0: file.version = r.choice([0, 1, 2, 4, 3 << 24])
    elif how == 1: file.magic = r.choice([0, 0x46554747 ^ 1, 0x47475546])
    else: file.counts[how - 2] = r.choice(EDGES)
    return file.bytes()


def metadata(r, data, file):
    for _ in range(r.choice([1, 1, 2, 3])):
        entry = r.choice(file.entries)
        kind, value, how = entry[1], entry[2], r.randrange(8)
        if how == 0 and len(file.entries) > 1: file.entries.remove(entry)
        elif how == 1: file.entries.append(list(entry))
        elif how == 2:
            # Another type with a value of that type.
            kind = r.choice([*FORMATS, STRING, ARRAY, 13, 1 << 31])
            entry[1:] = [kind, b"x" if kind == STRING else [4, []] if kind == ARRAY else 1]
        elif how == 3:
            # Nested arrays, written as bytes, because a recursive writer would exceed Python's recursion
            # limit.
            depth = r.choice([2, 50, 5000, 100000])
            file.entries.append([b"deep", 99, 0])
            written = file.bytes()
            mark = struct.pack("<I", 99) + b"\0" * 8
            return written.replace(mark, struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQ", 4, 0), 1)
        elif how == 4: file.lengths[entry[0]] = r.choice(EDGES)
        elif kind == STRING: entry[2] = r.choice(WORDS)
        elif kind == ARRAY:
            inner, items = value
            turn = r.randrange(4)
            if turn == 0: entry[2] = [inner, items[:-1]]
            elif turn == 1: entry[2] = [inner, []]
            elif turn == 2: entry[2] = [inner, items * r.choice([2, 10])]
            elif items: items[r.randrange(len(items))] = r.choice(WORDS) if inner == STRING else r.choice(FLOATS) if inner in (6, 12) else r.choice(EDGES) if inner in FORMATS else items[0]
        elif kind in (6, 12): entry[2] = r.choice(FLOATS)
        elif kind in FORMATS: entry[2] = r.choice([r.choice(EDGES), value + 1, max(0, value - 1), value * 2, value * 16])
    return file.bytes()


def tensors(r, data, file):
    for _ in range(r.choice([1, 1, 2, 3])):
        tensor = r.choice(file.tensors)
        how = r.randrange(9)
        if how == 0 and tensor[1]: tensor[1][r.randrange(len(tensor[1]))] = r.choice(EDGES)
        elif how == 1: tensor[1] = tensor[1][::-1]
        elif how == 2: tensor[1] = [r.choice(EDGES) for _ in range(r.choice([0, 1, 3, 4, 5, 8]))]
        elif how == 3: tensor[2] = r.choice([*range(42), 255, 1 << 31])
        elif how == 4: tensor[3] = r.choice(EDGES)
        elif how == 5: tensor[3] = r.choice(file.tensors)[3]
        elif how == 6 and len(file.tensors) > 1: file.tensors.remove(tensor)
        elif how == 7: file.tensors.append([tensor[0], list(tensor[1]), *tensor[2:]])
        else: tensor[0] = r.choice([b"", tensor[0] + b"2", r.choice(file.tensors)[0], b"\xff"])
    return file.bytes()


def weights(r, data, file):
    tensor = r.choice(file.tensors)
    start = tensor[3]
    size = min(4 * max(1, tensor[1][0] if tensor[1] else 1), max(0, len(file.weights) - start))
    word = struct.pack("<f", r.choice(FLOATS))
    file.weights[start:start + size] = r.choice([word * (size // 4), r.randbytes(size), file.weights[start:start + size - size % 4][::-1]]).ljust(size, b"\0")
    return file.bytes()


def vocabulary(r, data, file):
    tokens = file.entry(b"tokenizer.ggml.tokens")
    if not tokens: return raw(r, data, file)
    for _ in range(r.choice([1, 1, 2])):
        words, how = tokens[2][1], r.randrange(8)
        if how == 0: tokens[2] = [STRING, [r.choice(words) for _ in words]]
        elif how == 1: words[r.randrange(len(words))] = r.choice([b"a" * 1000000, b"\xe2\x96\x81" * 20000, b"<0x41>", b"<0xZZ>", b"</s>", b"\0", b""])
        elif how == 2: tokens[2] = [STRING, words[:r.choice([1, 2, max(1, len(words) // 2)])]]
        elif how == 3: tokens[2] = [STRING, words + [b"extra%d" % n for n in range(r.choice([1, 100, 100000]))]]
        elif how == 4: file.set(b"tokenizer.ggml.%s_token_id" % r.choice([b"bos", b"eos", b"unknown", b"padding", b"eot"]), 4, r.choice(EDGES))
        elif how == 5: file.set(b"tokenizer.ggml.model", STRING, r.choice([b"llama", b"gpt2", b"bert", b"gemma4", b"t5", b""]))
        elif how == 6: file.set(b"tokenizer.ggml.pre", STRING, r.choice([b"default", b"llama-bpe", b"qwen2", b"gpt-4o", b"xx"]))
        else:
            for key in (b"tokenizer.ggml.merges", b"tokenizer.ggml.token_type", b"tokenizer.ggml.scores"):
                entry = file.entry(key)
                if entry and r.random() < .5:
                    inner, items = entry[2]
                    other = {STRING: [b"", b" ", b"a b c", b"zz qq"], 6: FLOATS}.get(inner, [0, 3, 4, 6, 99])
                    entry[2] = [inner, [r.choice([item, r.choice(other)]) for item in items]]
    return file.bytes()


MUTATIONS = [raw, raw, raw, cut, header, metadata, metadata, metadata, tensors, tensors, weights, vocabulary, vocabulary]


def command(binary, path, kind):
    if "bert" not in kind:
        return [binary, "run", path, "-p", "Hello world, 12 it is", "-n", "3", "--threads", "1", "--temperature", "0.7"]
    return [binary, "embed", path, "--json", "--threads", "1"] + (["--query", "a bear", "--text", "a panda"] if "rerank" in kind else ["--text", "Hello world"])


def outcome(args):
    """Returns what is wrong with the exit of the command (or None), and the end of its standard error."""
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(args, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said,
                                 preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (TIME, TIME + 1)))
        # The limit of CPU time does not end a command that waits.
        late = threading.Timer(6 * TIME, child.kill)
        late.start()
        _, status, used = os.wait4(child.pid, 0)
        late.cancel()
        child.returncode = code = os.waitstatus_to_exitcode(status)
        said.seek(0)
        words = said.read().decode(errors="replace")
    wrong = "signal %d" % -code if code < 0 else "panic" if "panicked at" in words else "exit code %d" % code if code not in (0, 1, 64) else None
    if not wrong and used.ru_maxrss > MEMORY: wrong = "%d MB" % (used.ru_maxrss >> 10)
    return wrong, words[-300:]


def main():
    if len(sys.argv) not in (3, 4): sys.exit(__doc__)
    binary, seconds = os.path.abspath(sys.argv[1]), float(sys.argv[2])
    seeds = [1, int(sys.argv[3]) if len(sys.argv) == 4 else int(time.time())]
    fixtures = sorted(glob.glob(os.path.join(ROOT, "tests/fixtures/tiny/*/*.gguf")))
    findings, done = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            end, number = time.time() + seconds / 2, 0
            while time.time() < end:
                r = random.Random("%d/%d" % (seed, number))
                fixture, mutate = r.choice(fixtures), r.choice(MUTATIONS)
                with open(fixture, "rb") as file: data = file.read()
                path = os.path.join(folder, "mutant.gguf")
                with open(path, "wb") as file: file.write(mutate(r, data, File(data)))
                wrong, words = outcome(command(binary, path, os.path.basename(os.path.dirname(fixture))))
                if wrong:
                    kept = os.path.join(tempfile.gettempdir(), "kvasir-mutant-%d-%d.gguf" % (seed, number))
                    shutil.copy(path, kept)
                    findings.append("%s: seed %d, number %d, %s of %s, kept as %s\n%s" % (wrong, seed, number, mutate.__name__, os.path.relpath(fixture, ROOT), kept, words))
                number += 1
            done += number
            print("seed %d: %d mutants" % (seed, number))
    if findings: sys.exit("\n".join(findings))
    if done < 50: sys.exit("only %d mutants were tried" % done)


if __name__ == "__main__":
    main()
