#!/usr/bin/env python3
"""Renders chat templates with Jinja in the environment of Transformers, as the reference of our interpreter.

    reference.py write          writes tests/fixtures/templates/*.json from snippets.py and corpus.py
    reference.py fuzz SEED N    prints N random cases, one JSON object a line

A case has a template, its variables, and `output` or `error`. Needs jinja2 (`./test setup` installs it).
"""
import copy, datetime, json, os, random, resource, sys, warnings
import jinja2, jinja2.ext, jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = os.path.dirname(os.path.abspath(__file__))
# Time of `strftime_now`. The Rust tests use the same.
NOW = datetime.datetime(2026, 3, 5, 14, 7, 9, tzinfo=datetime.timezone.utc)


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training. It does not change the output."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller):
        return caller()


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = NOW.strftime
    return env


warnings.simplefilter("ignore")
ENVIRONMENT = environment()
DEFAULTS = {"messages": [], "tools": None, "documents": None, "add_generation_prompt": False, "bos_token": "<s>", "eos_token": "</s>"}


def case(template, **given):
    """Returns the case with Jinja's output or error."""
    made = {"template": template, **given}
    # Some filters modify their arguments.
    given = copy.deepcopy(given)
    variables = {**DEFAULTS, **{k: v for k, v in given.items() if k != "extra"}, **given.get("extra", {})}
    try:
        made["output"] = ENVIRONMENT.from_string(template).render(**variables)
        made["output"].encode()
    except Exception as error:  # Any exception means that the template fails.
        made.pop("output", None)
        made["error"] = "%s: %s" % (type(error).__name__, str(error)[:200])
    return made


def write():
    import corpus, snippets
    folder = os.path.join(HERE, "..", "fixtures", "templates")
    os.makedirs(folder, exist_ok=True)
    given = {"messages": snippets.MESSAGES, "tools": snippets.TOOLS, "extra": snippets.EXTRA}
    outcome = lambda made: {k: v for k, v in made.items() if k in ("output", "error")}
    fixtures = {
        "snippets": {**given, "cases": [{"template": t, **outcome(case(t, **given))} for t in snippets.SNIPPETS]},
        "corpus": {"chats": corpus.chats(), "templates": [
            {"name": name, "template": t, "outcomes": [outcome(case(t, **chat)) for chat in corpus.chats()]} for name, t in corpus.named()]},
    }
    for name, made in fixtures.items():
        with open(os.path.join(folder, name + ".json"), "w") as file:
            json.dump(made, file, ensure_ascii=False, indent=1)
            file.write("\n")


def fuzz(seed, count):
    import generator
    # Some templates allocate more memory than the machine has.
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    for number in range(count):
        made = generator.random_case(random.Random("%s/%s" % (seed, number)))
        print(json.dumps(case(**made)), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, HERE)
    if sys.argv[1:] == ["write"]:
        write()
    elif len(sys.argv) == 4 and sys.argv[1] == "fuzz":
        fuzz(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(__doc__)
