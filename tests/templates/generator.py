"""Generates random chat templates and chats for them."""
import json

# Not `loop` by itself: in Jinja it is an iterator over the rest of the loop. In our interpreter it has
# attributes only.
NAMES = ["messages", "m", "m.content", "m.role", "x", "s", "l", "d", "n", "i", "f", "ns.a", "e", "u", "p", "bos_token", "messages[0].content"] * 4 + ["tools", "nothing", "ns", "add_generation_prompt"]
# Defines most of NAMES.
BEGIN = "{% set ns = namespace(a=1) %}{% set x = 'abc' %}{% set n = 3 %}{% set m = {'role': 'user', 'content': ' hi '} %}{% macro q(a) %}[{{ a }}]{% endmacro %}"
TEXTS = ["", "a", "abc", " pad ", "a b  c", "x,y,,z", "<think>\nt\n</think>\n\nhi", "it's", 'q"q', "\n", "line\n  two\n\n", "\u00e9\u4f60\U0001f600", "Ab cD", "12", "-3.5", "%s", "{}", "{0}", "<|im_end|>", "\\", "\t", "\x00", "0"]
FILTERS = ["upper", "lower", "trim", "length", "list", "first", "last", "join", "join(', ')", "string", "int", "float", "tojson", "tojson(indent=2)", "tojson(sort_keys=true)", "sort", "sort(reverse=true)",
           "reverse|list", "unique|list", "sum", "min", "max", "abs", "round", "round(1)", "title", "capitalize", "replace('a', 'b')", "replace('', '-')", "default('d')", "default('d', true)", "indent", "indent(2, true)",
           "map('string')|list", "map('upper')|list", "map('length')|list", "map(attribute='role')|list", "select|list", "select('string')|list", "reject('none')|list", "selectattr('role', 'equalto', 'user')|list",
           "batch(2)|list", "slice(2)|list", "items|list", "dictsort", "wordcount", "center(9)", "truncate(5, true, '.', 0)", "format('x')", "count", "d(none)", "attr('x')", "groupby('role')", "select('odd')|list", "max(attribute='role')"]
METHODS = ["upper()", "lower()", "strip()", "lstrip('a')", "rstrip()", "split()", "split(',')", "split(none, 1)", "rsplit(' ', 1)", "splitlines()", "title()", "capitalize()", "startswith('a')", "endswith(('a', 'c'))", "find('b')",
           "replace('a', 'bb')", "replace('b', '', 1)", "join(['x', 'y'])", "format(1, 2)", "partition(' ')", "rpartition(' ')", "count('a')", "items()", "keys()|list", "values()|list", "get('a')", "get('zz', 5)", "get('role')",
           "isdigit()", "isalpha()", "isspace()", "islower()", "zfill(4)", "center(7, '*')", "ljust(4)", "removeprefix('a')", "removesuffix('c')", "swapcase()", "index('a')", "count(1)", "copy()", "expandtabs(3)", "isupper()", "istitle()", "isalnum()"]
TESTS = ["defined", "undefined", "none", "string", "number", "integer", "float", "boolean", "mapping", "sequence", "iterable", "odd", "even", "divisibleby(2)", "true", "false", "lower", "upper", "in [1, 'a']", "eq 1", "ne('a')", "callable", "equalto 'a'", "gt 1"]
BINARY = ["+", "-", "*", "/", "//", "%", "~", "==", "!=", "<", "<=", ">", ">=", "in", "not in", "and", "or"]
ATTRIBUTES = ["role", "content", "name", "a", "b", "x", "y", "first", "last", "0", "function", "length"]


def literal(r):
    kind = r.randrange(9)
    if kind == 0: return str(r.choice([0, 1, 2, 3, -1, 7, 10, 100, 255]))
    if kind == 1: return r.choice(["0.5", "1.0", "2.5", "1e3", "3.14159", "0.1", "1e-7", "1e20"])
    if kind == 2: return r.choice(["true", "false", "none", "True", "None"])
    return json.dumps(r.choice(TEXTS), ensure_ascii=False) if r.random() < .5 else "'%s'" % r.choice(["a", "b c", "", "%s", "{}", "x\\n", "\\'"])


def expression(r, depth):
    if depth <= 0:
        return literal(r) if r.random() < .45 else r.choice(NAMES)
    down = lambda: expression(r, depth - 1 - r.randrange(2))
    kind = r.randrange(16)
    if kind < 2: return "%s %s %s" % (down(), r.choice(BINARY), down())
    if kind == 2: return "(%s)" % down()
    if kind < 5: return "%s|%s" % (primary(r, depth), r.choice(FILTERS))
    if kind == 5: return "%s.%s" % (primary(r, depth), r.choice(METHODS))
    if kind == 6: return "%s.%s" % (primary(r, depth), r.choice(ATTRIBUTES))
    if kind == 7: return "%s[%s]" % (primary(r, depth), r.choice([literal(r), down(), "%s:%s" % (r.choice(["", "1", "-2"]), r.choice(["", "2", "-1"])), "::-1", "::2"]))
    if kind == 8: return "%s is %s%s" % (primary(r, depth), r.choice(["", "not "]), r.choice(TESTS))
    if kind == 9: return "%s if %s else %s" % (down(), down(), down())
    if kind == 10: return "[%s]" % ", ".join(down() for _ in range(r.randrange(4)))
    if kind == 11: return "{%s}" % ", ".join("%s: %s" % (literal(r), down()) for _ in range(r.randrange(3)))
    if kind == 12: return r.choice(["not ", "-", "+"]) + primary(r, depth)
    if kind == 13: return "%s %% %s" % (r.choice(["'%s'", "'%d|%5s'", "'%(a)s'", "'%.2f'", "'%x'"]), r.choice([down(), "(%s, %s)" % (down(), down())]))
    if kind == 14: return "%s.format(%s)" % (r.choice(["'{}'", "'{0}-{1}'", "'{:>5}'", "'{!r}'", "'{:.1f}'", "'{a}'"]), ", ".join(down() for _ in range(r.randrange(1, 3))))
    return r.choice(["range(%s)" % r.randrange(5), "dict(a=%s)" % down(), "namespace(a=%s).a" % down(), "caller is defined", "q(%s)" % down(), "(%s, %s)" % (down(), down())])


def primary(r, depth):
    return r.choice(NAMES) if r.random() < .5 else "(%s)" % expression(r, depth - 1) if r.random() < .7 else literal(r)


def space(r):
    return r.choice(["", "", "", "\n", "  ", "\n  ", " \n"])


def tag(r, inside):
    return "{%%%s %s %s%%}" % (r.choice(["", "", "", "-", "+"]), inside, r.choice(["", "", "", "-", "+"]))


def statement(r, depth):
    e = lambda d=2: expression(r, r.randrange(d))
    body = lambda: space(r) + "".join(statement(r, depth - 1) for _ in range(r.randrange(1, 3))) + space(r)
    kind = r.randrange(14) if depth > 0 else r.randrange(3)
    if kind == 0: return r.choice(["text", "<|im_start|>", " ", "\n", "a\n\nb", "{# c #}", "{#- c -#}", "\t", "\u00e9"])
    if kind < 3: return "{{%s %s %s}}" % (r.choice(["", "", "-"]), e(3), r.choice(["", "", "-"]))
    if kind == 3: return tag(r, "if " + e()) + body() + (tag(r, "elif " + e()) + body() if r.random() < .3 else "") + (tag(r, "else") + body() if r.random() < .5 else "") + tag(r, "endif")
    if kind < 7:
        head = r.choice(["for m in messages", "for m in messages", "for x in l", "for x in %s" % e(), "for x in range(3)", "for a, b in d.items()", "for x in l if x is odd", "for m in messages[1:]", "for m in messages if m.role != 'user'"])
        inner = body() + (tag(r, "if " + e(1)) + tag(r, r.choice(["break", "continue"])) + tag(r, "endif") if r.random() < .15 else "")
        if r.random() < .4: inner += "{{ %s }}" % r.choice(["loop.index", "loop.last", "loop.first", "loop.length", "loop.revindex0", "loop.previtem.role", "loop.nextitem", "loop.cycle('a', 'b')", "loop.changed(x)", "m.content", "m['role'] + ':'"])
        return tag(r, head) + inner + (tag(r, "else") + body() if r.random() < .2 else "") + tag(r, "endfor")
    if kind < 10: return tag(r, "set %s = %s" % (r.choice(["x", "n", "y", "ns.a", "ns.b", "x, n", "m"]), e(3)))
    if kind == 10: return tag(r, "set " + r.choice(["x", "y", "x | upper", "n | trim"])) + body() + tag(r, "endset")
    if kind == 11: return tag(r, "macro q(a%s)" % r.choice(["", ", b=2", ", b=a"])) + "{{ a }}" + body() + tag(r, "endmacro") + "{{ q(%s) }}" % e(1)
    if kind == 12: return tag(r, "with x = " + e()) + body() + tag(r, "endwith") if r.random() < .5 else tag(r, "filter " + r.choice(["upper", "trim", "replace('a', 'b')", "indent"])) + body() + tag(r, "endfilter")
    return tag(r, "generation") + body() + tag(r, "endgeneration")


def chat(r):
    messages = []
    for _ in range(r.randrange(4)):
        message = {"role": r.choice(["system", "user", "assistant", "tool"]), "content": r.choice(TEXTS)}
        if r.random() < .1: message["content"] = None
        if r.random() < .1: message["name"] = "n1"
        if r.random() < .1: message["tool_calls"] = [{"type": "function", "id": "c1", "function": {"name": "f", "arguments": r.choice([{"a": 1}, '{"a": 1}'])}}]
        messages.append(message)
    return messages


def random_case(r):
    template = "".join(statement(r, r.randrange(3)) for _ in range(r.randrange(1, 3)))
    if r.random() < .05:
        # Sometimes breaks the syntax.
        at = r.randrange(len(template) + 1)
        template = template[:at] + r.choice(["", "%}", "{{", "'", "(", "|", "-", "{%"]) + template[at + r.randrange(4):]
    return {"template": BEGIN + template, "messages": chat(r), "add_generation_prompt": r.random() < .5,
            "tools": r.choice([None, None, [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}]]),
            "extra": {"s": r.choice(TEXTS), "l": r.choice([[1, 2, 3], ["b", "a"], [], [3, 1.5, True], [None, "x"], [[1], [2, 3]]]), "d": r.choice([{}, {"a": 1, "b": "x"}, {"b": {"a": [1]}, "a": None}]),
                      "i": r.choice([0, 1, 7, -3, 1234]), "f": r.choice([0.5, 2.0, -1.25, 1e17, 1e-5]), "u": "\u00c9\u4f60", "e": "", "p": [{"role": "user", "x": 1}, {"role": "tool", "x": 2}]}}
