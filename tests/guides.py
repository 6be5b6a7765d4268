"""Checks the guides against the sources: error texts, flags and variables exist, and links have a target.

`python tests/guides.py`
"""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [ROOT / "docs/config.md", *ROOT.glob("docs/guides/*.md"), ROOT / "docs/runbooks.md", *ROOT.glob("deploy/k8s/**/README.md")]
SOURCES = [
    path
    for crate in ("src", "coordinator", "worker", "model", "proto", "kernels/cuda/src")
    for path in (ROOT / crate).rglob("*.rs")
    if "tests" not in path.parts
]
# Flags of other programs.
FOREIGN = {"--help", "--all", "--kubelet-arg", "--from-file", "--for", "--timeout", "--release"}
# Flags of other programs on single pages: tar, sha256sum, systemctl, skopeo, deploy/release; vLLM, SGLang, llama-server.
FOREIGN_OF = {
    # podman's.
    "containers.md": {"--rm", "--restart", "--network", "--stop-timeout", "--read-only", "--cap-drop", "--security-opt", "--name"},
    "bare-metal.md": {"--ignore-missing", "--now", "--preserve-digests", "--registry", "--strip-components"},
    "deployments.md": {"--cache-ram", "--kv-cache-memory-bytes"},
    "over-vllm.md": {
        "--cache-ram", "--data-parallel-rank", "--data-parallel-size", "--enable-deterministic-inference",
        "--enable-metrics", "--enable-prefix-caching", "--enable-priority-scheduling", "--enable-prompt-tokens-details",
        "--enable-memory-saver", "--enable-sleep-mode", "--enable-weights-cpu-backup", "--sleep-idle-seconds",
        "--kv-events-config", "--metrics", "--model-path", "--page-size", "--port", "--scheduling-policy", "--slots",
        "--structured-outputs-config",
    },
}


def literals():
    """All string literals of the sources, with continued lines joined."""
    texts = []
    for path in SOURCES:
        for literal in re.findall(r'"((?:[^"\\]|\\.)*)"', path.read_text(), re.DOTALL):
            texts.append(re.sub(r"\\\n\s*", "", literal).replace('\\"', '"'))
    return texts


def error_texts_are_the_programs():
    texts, seen = literals(), 0
    for page in PAGES:
        for quoted in re.findall(r"^ *```text\n(.*?)\n *```", page.read_text(), re.MULTILINE | re.DOTALL):
            parts = [re.escape(part) for part in re.split("…", " ".join(quoted.split())) if part.strip()]
            pattern = re.compile(".*".join(parts), re.DOTALL)
            assert any(pattern.search(text) for text in texts), f"{page.name}: the program does not say {quoted!r}"
            seen += 1
    assert seen > 30, seen


def flags_and_variables_are_the_programs():
    sources = "".join(path.read_text() for path in SOURCES)
    fields = set(re.findall(r"^    (?:pub\(crate\) )?(\w+): ", sources, re.MULTILINE)) | set(re.findall(r'long = "([\w-]+)"', sources))
    flags = {"--" + field.replace("_", "-") for field in fields}
    variables = set(re.findall(r"KVASIR_\w+", sources))
    for page in PAGES:
        text = page.read_text()
        foreign = FOREIGN | FOREIGN_OF.get(page.name, set())
        if page.name == "migrating.md":
            # The first column has flags of the other program.
            text = re.sub(r"^\|((?:[^|\\]|\\.)*)\|", "", text, flags=re.MULTILINE)
            text = re.sub(r"^Not there:.*$(\n.+)*", "", text, flags=re.MULTILINE)
        code = "\n".join(re.findall(r"`([^`]*)`", text.replace("```", "`")))
        for line in code.splitlines():
            if "kubectl" in line or "cargo" in line:
                continue
            unknown = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", line)) - flags - foreign
            assert not unknown, f"{page}: {unknown} in {line!r}"
        unknown = set(re.findall(r"KVASIR_[A-Z_]+", code)) - variables
        assert not unknown, f"{page}: {unknown}"


def links_lead_somewhere():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*.md"), *ROOT.glob("bench/**/*.md")]
    assert len(pages) > 80, len(pages)
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)", text, re.MULTILINE)
        for target in targets:
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page}: {target}"


def decisions_have_one_index():
    folder = ROOT / "docs/decisions"
    index = (folder / "README.md").read_text()
    decisions = sorted(folder.glob("[0-9]*.md"))
    for page in decisions:
        title = page.read_text().split("\n", 1)[0]
        number = int(page.name[:4])
        assert re.match(rf"# {number}\. \S", title), f"{page.name}: {title!r}"
        row = f"| [{number}]({page.name}) | {title.split('. ', 1)[1]} |"
        assert row in index, f"docs/decisions/README.md has no row {row!r}"
    assert index.count("\n| [") == len(decisions), "docs/decisions/README.md has a row too many"


def the_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 120, len(lines)
    for number, line in enumerate(lines, 1):
        assert len(line) <= 120, f"README.md:{number} has {len(line)} columns"


def main():
    tests = [
        error_texts_are_the_programs,
        flags_and_variables_are_the_programs,
        links_lead_somewhere,
        decisions_have_one_index,
        the_readme_is_short,
    ]
    for test in tests:
        test()
        print(f"test {test.__name__} ... ok")
    print(f"{len(tests)} passed, 0 failed")


if __name__ == "__main__":
    main()
