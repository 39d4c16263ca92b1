#!/usr/bin/env python3
"""Every public call has the same overloads on both contexts, or stands in docs/support.md.

A public call is a function, a member of an owner or the operator() of a functor whose first parameter is
`const host&` or `const cuda&`, declared in include/kvpolicy/<operation>/*.hpp or cuda_*.cuh.

pairs    the overloads of a call on `host` and on `cuda` have the same template parameters, and the same
         parameters by type and name
names    the context is called ctx, where it has a name
support  the calls of one context alone are those of the table "Calls on one context only" of
         docs/support.md. A row for `name` is one for `name_workspace_bytes`, too.

    overloads.py [--report] [--root FOLDER] [pairs] [names] [support]
"""

import collections
import re

import cpp
import house

HEADER = re.compile(r"include/kvpolicy/\w+/(\w+\.hpp|cuda_\w+\.cuh)$")
CONTEXT = re.compile(r"\(\s*const (host|cuda)\s*&\s*(\w*)\s*(?=[,)])")
# Template parameters that nobody gives: they delay an instantiation, or name the build.
DELAYED = {"Build", "Expiry"}
# The layers of both kinds of caches: one template on the host, two overloads on CUDA.
LAYER = re.compile(r"\b(FixedBudgetRef|DualRef)<P, T>")
LAYER_TEMPLATE = "template <class, class> class Ref"
# Found by argument-dependent lookup from a public call, and not for users.
HOOKS = {"measure_on"}
INTERNAL = {"detail", "checks", "host_backend", "cuda_backend"}
SUPPORT = "docs/support.md"
MARK = "<!-- support: calls -->"

Overload = collections.namedtuple("Overload", "name context ctx templates parameters place")


def split(text):
    """The parts of a list between commas, but for commas within brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "([{<":
            depth += 1
        elif c in ")]}" or (c == ">" and text[i - 1] != "-"):
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [part.strip() for part in parts + [text[start:]] if part.strip()]


def without_default(parameter):
    """A parameter without its default, with single spaces."""
    depth = 0
    for i, c in enumerate(parameter):
        depth += (c in "([{<") - (c in ")]}>")
        if c == "=" and depth == 0:
            parameter = parameter[:i]
            break
    return re.sub(r"\s+", " ", re.sub(r"\[\[\w+\]\]", "", parameter)).strip()


def templates_of(head):
    """The template parameters of a declaration's head."""
    match = re.match(r"\s*template\s*<", head)
    if not match:
        return ()
    rest = cpp.without_templates(head)
    listed = head[match.end() : len(head) - len(rest)]
    listed = listed[: listed.rindex(">")]
    parameters = [without_default(part) for part in split(listed)]
    return tuple(part for part in parameters if part.split()[-1] not in DELAYED)


def scopes(text):
    """[(start, end, kind, name, bases)] of the braces of a text; kind: namespace, class or other."""
    found, stack, start, parens = [], [], 0, 0
    for i, c in enumerate(text):
        parens += (c in "([") - (c in ")]")
        if c == "{":
            head = cpp.without_templates(text[start:i])
            head = re.sub(r"^\s*(public|private|protected)\s*:\s*", "", head)
            space = re.match(r"\s*(?:inline\s+)?namespace\b\s*([\w:]*)", head)
            kind = re.match(r"\s*(?:struct|class)\s+(\w+)\s*(?:final\s*)?(?::([^:].*))?\s*$", head, re.S)
            if parens == 0 and space:
                stack.append((i, "namespace", space.group(1), ()))
            elif parens == 0 and kind:
                bases = [re.match(r"(?:(?:public|private|protected|virtual)\s+)*([\w:]+)", base)
                         for base in split(kind.group(2) or "")]
                bases = tuple(base.group(1).split("::")[-1] for base in bases if base)
                stack.append((i, "class", kind.group(1), bases, head.lstrip().startswith("struct")))
            else:
                stack.append((i, "other", "", ()))
            start = i + 1
        elif c == "}":
            if stack:
                found.append((stack[-1][0], i) + stack[-1][1:])
                stack.pop()
            start = i + 1
        elif c == ";" and parens == 0:
            start = i + 1
    return sorted(found)


def is_public(text, scope, position):
    """Whether a place of a class is public."""
    depth, access = 0, "public" if scope[5] else "private"
    for match in re.finditer(r"[{}]|\b(public|private|protected)\s*:(?!:)", text[scope[0] + 1 : position]):
        if match.group(1):
            access = match.group(1) if depth == 0 else access
        else:
            depth += 1 if match.group() == "{" else -1
    return access == "public"


def declared(tree):
    """The overloads of the tree, those of a base class as members of the classes made of it."""
    found, bases = [], {}
    for path, text in tree.items():
        if not HEADER.match(path):
            continue
        text = cpp.without_directives(cpp.blank(text))
        inside = scopes(text)
        for scope in inside:
            if scope[2] == "class" and scope[4]:
                bases.setdefault(scope[3], set()).update(scope[4])
        for match in CONTEXT.finditer(text):
            around = [scope for scope in inside if scope[0] < match.start() < scope[1]]
            if any(scope[2] == "other" for scope in around):
                continue
            owner = next((scope for scope in reversed(around) if scope[2] == "class"), None)
            internal = any(set(scope[3].split("::")) & INTERNAL
                           for scope in around if scope[2] == "namespace")
            if (internal and not owner) or (owner and not is_public(text, owner, match.start())):
                continue
            begin = max(text.rfind(";", 0, match.start()), text.rfind("}", 0, match.start()))
            begin = max(begin, *(scope[0] for scope in around), 0) + 1
            head = re.sub(r"^\s*(public|private|protected)\s*:", "", text[begin : match.start()])
            name = re.search(r"(operator\s*\(\)|\w+)\s*$", head)
            if not name or name.group(1) in ("requires", "explicit"):
                continue
            name = re.sub(r"\s+", "", name.group(1))
            if owner and name == owner[3] or name in HOOKS:
                continue  # a constructor, or a hook
            end = cpp.closing(text, match.start(), "()")
            parameters = [without_default(part) for part in split(text[match.start() + 1 : end])][1:]
            parameters = [LAYER.sub("Ref<P, T>", part) for part in parameters]
            templates = tuple(part for part in templates_of(head) if part != LAYER_TEMPLATE)
            full = f"{owner[3]}::{name}" if owner else name
            place = f"{path}:{text.count(chr(10), 0, match.start()) + 1}"
            found.append(
                Overload(full, match.group(1), match.group(2), templates, tuple(parameters), place)
            )
    return inherit(found, bases)


def inherit(found, bases):
    derived = {}
    for name, of in bases.items():
        for base in of:
            derived.setdefault(base, set()).add(name)
    result = []
    for one in found:
        owner, _, member = one.name.rpartition("::")
        heirs, seen = {owner}, set()
        while (heirs - seen) & derived.keys():
            seen |= heirs
            heirs = {below for heir in heirs for below in derived.get(heir, {heir})}
        result += [one._replace(name=f"{heir}::{member}" if heir else member) for heir in sorted(heirs)]
    return result


def by_name(tree):
    calls = {}
    for one in declared(tree):
        overloads = calls.setdefault(one.name, {"host": {}, "cuda": {}})
        overloads[one.context][(one.templates, one.parameters)] = one
    return calls


def listed(tree):
    """The rows of the table: {call: (on the host, on CUDA)}."""
    _, _, rest = tree.get(SUPPORT, "").partition(MARK)
    rows = {}
    for line in rest.strip().splitlines():
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        name = re.fullmatch(r"`([\w:()]+)`", cells[0])
        if name:
            rows[name.group(1)] = (cells[1] == "yes", cells[2] == "yes")
    return rows


def row_of(name, rows):
    return next((row for row in (name, name.removesuffix("_workspace_bytes")) if row in rows), None)


def pairs(tree):
    findings = []
    for name, sides in sorted(by_name(tree).items()):
        if not sides["host"] or not sides["cuda"]:
            continue
        for side, other in (("host", "cuda"), ("cuda", "host")):
            for key in sides[side].keys() - sides[other].keys():
                templates, parameters = key
                findings.append(
                    f"{sides[side][key].place}: {name} is on {side} alone: <{', '.join(templates)}>"
                    f"({', '.join(parameters)})"
                )
    return findings


def names(tree):
    return [
        f"{one.place}: the context of {one.name} is called {one.ctx}"
        for one in sorted(set(declared(tree)))
        if one.ctx not in ("ctx", "")
    ]


def support(tree):
    rows, findings, used = listed(tree), [], set()
    if not rows:
        return [f"{SUPPORT}: no table after {MARK}"]
    for name, sides in sorted(by_name(tree).items()):
        on = (bool(sides["host"]), bool(sides["cuda"]))
        row = row_of(name, rows)
        used.add(row)
        if on == (True, True):
            if row == name:
                findings.append(f"{SUPPORT}: {name} is on both contexts")
        elif row is None:
            one = next(iter(sides["host"].values() or sides["cuda"].values()))
            findings.append(f"{one.place}: {name} is on {one.context} alone, and not in {SUPPORT}")
        elif rows[row] != on:
            findings.append(f"{SUPPORT}: {name} is on {'host' if on[0] else 'cuda'} alone")
    findings += [f"{SUPPORT}: there is no call {row}" for row in rows if row not in used]
    return findings


CHECKS = {"pairs": pairs, "names": names, "support": support}


def self_test():
    good = {
        "include/kvpolicy/masks/build.hpp": """
            namespace kvpolicy {
            template <AnyPolicy P>
            void build(const host& ctx, const P& policy, plane_view<const float> scores,
                       Options options = {});
            template <class T>
            void only(const host& ctx, T x);
            std::size_t only_workspace_bytes(const host& ctx);
            struct Loss {
                template <class P>
                void operator()(const host& ctx, const P& policy) const;
            #if defined(__CUDACC__)
                template <class P, class Build = cuda_build>
                void operator()(const cuda& ctx, const P& policy) const;
            #endif
            };
            class Owner : private detail::base<int> {
                void hidden(const host& on);
              public:
                void clear(const host& ctx, std::int32_t seq);
            };
            namespace detail { void helper(const host& on); }
            }""",
        "include/kvpolicy/masks/cuda_build.cuh": """
            template <AnyPolicy P>
            void build(const cuda& ctx, const P& policy, plane_view<const float> scores,
                       Options options = {});
            namespace detail {
            template <class T>
            class base {
              public:
                template <class Build = cuda_build>
                void clear(const cuda& ctx, std::int32_t seq);
            };
            }""",
        SUPPORT: f"{MARK}\n| call | CPU | CUDA |\n| --- | --- | --- |\n| `only` | yes | no |\n\n",
    }
    for check, run in CHECKS.items():
        house.expect(not run(good), f"{check} finds {run(good)} in a good tree")

    def fails(path, old, new, *expected):
        house.expect(old in good[path], f"{old} is not in the self-test's {path}")
        changed = dict(good, **{path: good[path].replace(old, new)})
        failed = {check for check, run in CHECKS.items() if run(changed)}
        house.expect(failed == set(expected), f"{old} -> {new}: expected {set(expected)}, was {failed}")

    public, device = "include/kvpolicy/masks/build.hpp", "include/kvpolicy/masks/cuda_build.cuh"
    fails(device, "const P& policy", "const P& rules", "pairs")
    fails(device, "plane_view<const float>", "plane_view<float>", "pairs")
    fails(device, "std::int32_t seq", "std::int64_t seq", "pairs")
    fails(public, "const P& policy) const;\n            #if", "P policy) const;\n            #if", "pairs")
    fails(public, "build(const host& ctx", "build(const host& on", "names")
    fails(public, "void only(const host& ctx", "void other(const host& ctx", "support")
    fails(SUPPORT, "| yes | no |", "| no | yes |", "support")
    fails(SUPPORT, "`only`", "`build`", "support")
    fails(device, "void build(", "void make(", "support")


if __name__ == "__main__":
    house.main("overloads", CHECKS, self_test)
