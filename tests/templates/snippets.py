"""Small templates for one construct each, with a common chat, tools and variables."""

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi there, <b>\"you\"</b> & 'me' \n"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2.5}}}]},
            {"role": "tool", "content": "3.5", "tool_call_id": "c1", "name": "add"}, {"role": "assistant", "content": "<think>\nsum\n</think>\n\nIt is 3.5 \u00e9\u4f60\U0001f600"}]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {
    "a": {"type": "number", "description": "First"}, "b": {"type": ["number", "null"], "enum": [1, 2.5, None, True]}}, "required": ["a"]}}}]
EXTRA = {"i": 7, "n": -3, "f": 2.5, "big": 12345678901234567890, "tiny": 1e-7, "s": "abc", "u": "\u00c9t\u00e9 \u4f60\u597d", "e": "", "t": True, "no": None,
         "l": [3, 1, 2], "w": ["pear", "Apple", "fig", "apple"], "d": {"b": 1, "a": 2, "c": {"x": [1, 2]}}, "el": [], "ed": {},
         "p": [{"n": "x", "g": 1, "v": 10}, {"n": "y", "g": 2, "v": 20}, {"n": "Z", "g": 1, "v": 30}], "m": "one\n  two\n\nthree\n", "items": [1, 2]}

SNIPPETS = r"""
{{ messages[0].content }}|{{ messages[0]['content'] }}|{{ messages[0].nothing }}|{{ messages[-1]['role'] }}
{{ messages[9] }}|{{ messages[9] is defined }}|{{ nothing }}|{{ nothing is undefined }}
{{ nothing.more }}
{{ messages[9].role }}
{{ nothing + 1 }}
{{ 'a' + nothing }}
{{ 'a' ~ nothing ~ 1 ~ none ~ true ~ 1.0 ~ [1, 'b'] }}
{{ nothing == nothing2 }} {{ nothing == none }} {{ nothing != '' }} {{ 'x' in nothing }} {{ nothing|length }} {{ nothing|list }}
{% for x in nothing %}x{% else %}none{% endfor %}
{{ nothing|default('d') }} {{ e|default('d') }} {{ e|default('d', true) }} {{ no|d('x') }} {{ no|d('x', boolean=true) }}
{{ (nothing|default({})).x }}
{{ nothing|int }}
{{ nothing|join }}[{{ nothing|trim }}][{{ nothing|upper }}]
{{ 1 }} {{ 1.0 }} {{ 1e3 }} {{ 1e16 }} {{ 1e15 }} {{ 1.5e-5 }} {{ 0.0001 }} {{ 123456789.123456789 }} {{ 1e22 }} {{ 1e100 }} {{ -0.0 }}
{{ 1_000 }} {{ 0x1F }} {{ 0b101 }} {{ 0o17 }} {{ 1_0.5_0 }} {{ 1e-3 }} {{ 2.0e+2 }}
{{ big }} {{ big + 1 }} {{ tiny }} {{ f }} {{ i }} {{ t }} {{ no }} {{ true }} {{ True }} {{ False }} {{ None }} {{ none }}
{{ 7 / 2 }} {{ 6 / 2 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ 7 // -2 }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 7 % -3 }} {{ 7.5 % 2 }} {{ -7.5 % 2 }} {{ 7.5 // 2 }} {{ -7.5 // 2 }}
{{ 2 ** 10 }} {{ 2 ** -1 }} {{ 2 ** 0.5 }} {{ -2 ** 2 }} {{ 2 ** 3 ** 2 }} {{ 4 ** 0.5 }} {{ (-8) ** 2 }}
{{ 1 / 0 }}
{{ 1 // 0 }}
{{ 1 % 0 }}
{{ 1.0 / 0 }}
{{ 1 + 2 * 3 }} {{ (1 + 2) * 3 }} {{ 10 - 2 - 3 }} {{ 2 * 3 % 4 }} {{ -i }} {{ +i }} {{ - -i }} {{ 1 - -1 }}
{{ 1 + true }} {{ true + true }} {{ 1.0 + 1 }} {{ 'a' * 3 }} {{ 3 * 'ab' }} {{ [1] * 2 }} {{ 'a' * 0 }} {{ 'a' * -1 }} {{ (1, 2) * 2 }}
{{ 'a' + 1 }}
{{ [1] + (2,) }}
{{ 'a' - 'b' }}
{{ [1, 2] + [3] }} {{ (1,) + (2, 3) }} {{ () }} {{ (1,) }} {{ [] }} {{ {} }} {{ 1, 2 }}
{{ 'a' 'b' "c" }} {{ 'it\'s' }} {{ "q\"q" }} {{ 'a\nb\tc\\d' }} {{ '\x41\u00e9\U0001F600\101' }} {{ 'a\qb' }}
{{ ['a', "b'c", 'd"e', 'f\'g"h', 'n\n', '\\', 'é', '\x00', '\u200b', '\x7f', '\xa0'] }}
{{ {'a': 1, 'b': [1, {'c': none}], 1: 2.0, none: true, 1.5: 'x', (1, 2): 3} }}
{{ {'a': 1, 'a': 2} }} {{ {1: 'a', true: 'b', 1.0: 'c'} }} {{ {1: 'x'}[true] }} {{ {1: 'x'}[1.0] }}
{{ {[1]: 2} }}
{{ 1 == 1.0 }} {{ 1 == true }} {{ 0 == false }} {{ '1' == 1 }} {{ [1, 2] == [1.0, 2] }} {{ (1,) == [1] }} {{ {'a': 1} == {'a': 1.0} }} {{ none == false }} {{ 'a' != 'b' }}
{{ 1 < 2 }} {{ 1 < 2 < 3 }} {{ 1 < 2 > 3 }} {{ 'a' < 'b' }} {{ 'Z' < 'a' }} {{ [1, 2] < [1, 3] }} {{ [1] < [1, 0] }} {{ 1 <= 1.0 }} {{ (1, 2) >= (1, 2) }} {{ 1 < 2 == 2 }} {{ 1 == 1 in [true] }}
{{ 1 < 'a' }}
{{ none < 1 }}
{{ [1] < (1,) }}
{{ 'a' in 'abc' }} {{ 'a' not in 'abc' }} {{ 1 in [1.0] }} {{ 'a' in {'a': 1} }} {{ 1 in {'a': 1}.values() }} {{ '' in 'a' }} {{ not 'a' in 'b' }}
{{ 1 in 'abc' }}
{{ 1 in 5 }}
{{ 1 and 0 }} {{ 0 or 'x' }} {{ '' or none }} {{ 1 and 'y' }} {{ not 1 }} {{ not '' }} {{ not not 1 }} {{ 1 or 1/0 }} {{ [] or {} or 'z' }}
{{ 'a' if t else 'b' }} {{ 'a' if not t }} {{ 'a' if e else 'b' if e else 'c' }} [{{ 'x' if false }}] {{ ('a' if t) ~ 'b' }}
{{ s[0] }} {{ s[-1] }} {{ s[1:] }} {{ s[:-1] }} {{ s[::-1] }} {{ s[::2] }} {{ s[5:] }} {{ s[-2:] }} {{ u[1] }} {{ u[4:] }} {{ u[::-1] }} {{ s[1:1] }} {{ s[-100:2] }} {{ s[100::-1] }} {{ u[1:3] }} {{ u[:-1:2] }}
{{ s[9] }}|{{ s['x'] }}|{{ l['x'] }}|{{ l[1.0] }}|{{ d[0] }}|{{ i.x }}|{{ i['x'] }}|{{ l[none] }}
{{ l[0] }} {{ l[-1] }} {{ l[1:] }} {{ l[::-1] }} {{ l[true] }} {{ l.0 }} {{ l.1 }} {{ d.c.x.0 }} {{ (1, 2, 3)[1:] }} {{ range(5)[1] }} {{ range(5)[1:3] }} {{ range(5)[-1] }}
{{ l[::0] }}
{{ l['a':] }}
{{ 5[0] }}|{{ none[0] }}|{{ no.x }}|{{ d.items()[0] }}|{{ d.keys()[0] }}
{{ d.b }} {{ d['b'] }} {{ d.get('b') }} {{ d.get('q') }} {{ d.get('q', 5) }} {{ d.c['x'] }} {{ d['get'] is callable }} {{ d.items is callable }} {{ {'items': 1}.items is callable }} {{ {'items': 1}['items'] }}
{{ d.keys()|list }} {{ d.values()|list }} {{ d.items()|list }} {{ d|list }} {{ d|length }} {{ d.items()|length }} {{ d.keys() }} {{ d.values() }} {{ d.items() }}
{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{% for k in d %}{{ k }}{% endfor %}{% for k, v in d|items %}{{ k }}{% endfor %}{% for k, v in d|dictsort %}{{ k }}{{ v if v is not mapping }}{% endfor %}
{{ d.update({'x': 1}) }}
{{ l.append(1) }}
{{ d.pop('a') }}
{{ d.setdefault('a', 1) }}
{{ l.sort() }}
{{ s.__class__ }}|{{ s['__class__'] }}|{{ ''.__class__ is defined }}
{{ ''.__class__.mro() }}
{{ l.count(1) }} {{ l.index(1) }} {{ (1, 1).count(1) }} {{ l.copy() }} {{ d.copy().a }}
{{ l.index(9) }}
{{ s.upper() }} {{ s.capitalize() }} {{ 'aB cD'.title() }} {{ 'aB'.swapcase() }} {{ 'AB'.lower() }} {{ "they're bill's".title() }} {{ 'ß'.upper() }} {{ 'ÀÉ'.lower() }} {{ 'straße'.casefold() }}
{{ ' a '.strip() }}|{{ ' a '.lstrip() }}|{{ ' a '.rstrip() }}|{{ 'xxaxx'.strip('x') }}|{{ 'xyaxy'.lstrip('yx') }}|{{ 'axy'.rstrip('y') }}|{{ '\n\ta\x1f'.strip() }}|{{ ' a '.strip(none) }}
{{ 'a,b,c'.split(',') }} {{ ' a  b '.split() }} {{ 'a,b,c'.split(',', 1) }} {{ 'a b  c'.split(none, 1) }} {{ 'a,b,c'.rsplit(',', 1) }} {{ ' a b  c '.rsplit(none, 1) }} {{ 'abc'.split('x') }} {{ ''.split() }} {{ ''.split(',') }} {{ 'aXbX'.split('X') }} {{ 'a b c'.split(maxsplit=1) }} {{ 'aaa'.rsplit('aa') }} {{ 'a b c '.split(' ', 0) }} {{ ' a b'.split(none, 0) }}
{{ 'a'.split('') }}
{{ 'a\nb\r\nc\rd'.splitlines() }} {{ 'a\n'.splitlines(true) }} {{ ''.splitlines() }} {{ 'a\n\nb'.splitlines() }} {{ '\n'.splitlines() }}
{{ 'a-b-c'.partition('-') }} {{ 'a-b-c'.rpartition('-') }} {{ 'abc'.partition('-') }} {{ 'abc'.rpartition('-') }}
{{ 'aab'.replace('a', 'x') }} {{ 'aab'.replace('a', 'x', 1) }} {{ 'ab'.replace('', '-') }} {{ 'ab'.replace('a', '') }} {{ 'aaa'.replace('aa', 'b') }} {{ 'é1'.replace('', '.') }}
{{ 'abc'.startswith('ab') }} {{ 'abc'.endswith('bc') }} {{ 'abc'.startswith(('x', 'a')) }} {{ 'abc'.startswith('b', 1) }} {{ 'abc'.endswith('b', 0, 2) }} {{ 'abc'.startswith('') }} {{ ''.startswith('a') }} {{ 'abc'.startswith('', 4) }}
{{ 'abcabc'.find('c') }} {{ 'abc'.find('x') }} {{ 'abcabc'.rfind('c') }} {{ 'abcabc'.find('c', 3) }} {{ 'abc'.index('b') }} {{ 'aXa'.count('a') }} {{ 'aaa'.count('aa') }} {{ 'abc'.count('') }} {{ 'éa'.find('a') }} {{ 'abc'.find('', 9) }} {{ 'abcabc'.rindex('a') }}
{{ 'abc'.index('x') }}
{{ 'x'.join(['a', 'b']) }} {{ ''.join(['a']) }} {{ ', '.join(d) }} {{ '-'.join('abc') }} {{ ','.join(d.keys()) }}
{{ ','.join([1, 2]) }}
{{ 'ab'.center(7) }}|{{ 'ab'.center(5, '*') }}|{{ 'ab'.ljust(4) }}|{{ 'ab'.rjust(4, '.') }}|{{ '7'.zfill(3) }}|{{ '-7'.zfill(4) }}|{{ 'abc'.zfill(2) }}|{{ 'abc'.center(6) }}|{{ 'é'.rjust(3) }}
{{ 'TestHook'.removeprefix('Test') }} {{ 'TestHook'.removesuffix('Hook') }} {{ 'abc'.removeprefix('x') }} {{ ''.removeprefix('') }}
{{ 'ab1'.isalnum() }} {{ 'ab'.isalpha() }} {{ '12'.isdigit() }} {{ '12'.isdecimal() }} {{ '²'.isdigit() }} {{ '½'.isnumeric() }} {{ ' \n'.isspace() }} {{ 'ab'.islower() }} {{ 'AB'.isupper() }} {{ 'Ab Cd'.istitle() }} {{ 'a_1'.isidentifier() }} {{ 'é'.isascii() }} {{ ''.isalpha() }} {{ 'a\n'.isprintable() }} {{ '1a'.isidentifier() }} {{ ''.isprintable() }}
{{ 'a\tb'.expandtabs() }}|{{ 'a\tb'.expandtabs(4) }}|{{ '\t'.expandtabs(2) }}
{{ '%s and %s' % ('a', 1) }} {{ '%s' % 'x' }} {{ '%d' % 5.9 }} {{ '%5d|%-5d|%05d|%+d' % (1, 2, 3, 4) }} {{ '%.2f' % 3.14159 }} {{ '%x %X %o %#x' % (255, 255, 8, 255) }} {{ '%e' % 12345.678 }} {{ '%g %g' % (0.0001, 1e10) }} {{ '%%' % () }} {{ '%r' % 'a' }} {{ '%c%c' % ('a', 98) }} {{ '%5.1f|' % 2.25 }} {{ '%-5s|%5s' % ('a', 'b') }} {{ '%.2s' % 'abc' }} {{ '%(a)s-%(b)d' % {'a': 'x', 'b': 2} }} {{ '%s' % none }} {{ '%s' % [1] }} {{ 'no' % {} }} {{ '%*d' % (4, 1) }} {{ '%i' % true }}
{{ '%s %s' % ('a',) }}
{{ '%s' % ('a', 'b') }}
{{ '%d' % 'a' }}
{{ 'a' % 1 }}
{{ '{} {}'.format('a', 1) }} {{ '{1} {0}'.format('a', 'b') }} {{ '{x}-{y}'.format(x=1, y='z') }} {{ '{0.role}|{0[role]}'.format(messages[0]) }} {{ '{{}}{}'.format(1) }} {{ '{!r}'.format('a') }} {{ '{:>5}|{:<5}|{:^5}|{:*^5}'.format('a', 'b', 'c', 'd') }} {{ '{:05d} {:+d} {:,} {:_}'.format(42, 42, 1234567, 1234567) }} {{ '{:.2f} {:e} {:g} {:%}'.format(3.14159, 12345.678, 1e10, 0.25) }} {{ '{:x} {:#x} {:b} {:o} {:c}'.format(255, 255, 5, 8, 97) }} {{ '{:>{}}'.format('a', 4) }} {{ '{:.3}'.format('abcdef') }} {{ '{:10.3f}|'.format(2.5) }} {{ '{}'.format(none) }} {{ '{}'.format([1, 'a']) }} {{ '{:d}'.format(true) }} {{ '{}'.format(true) }} {{ '{:.3}'.format(2.0) }} {{ '{:5}|{:<5}|'.format(1, 2) }} {{ '{:.1%}'.format(0.1234) }} {{ '{:,.2f}'.format(1234567.891) }} {{ '{l[0]}'.format(l=[9]) }}
{{ '{} {}'.format('a') }}
{{ '{} {0}'.format('a') }}
{{ '{'.format('a') }}
{{ '{:d}'.format('a') }}
{{ '{a}'.format_map({'a': 5}) }}
{{ '%s-%s'|format('a', 2) }} {{ '%(x)s'|format(x=3) }}
{{ s|upper }} {{ 'ABC'|lower }} {{ 'hello world-foo (bar) <baz>'|title }} {{ 'hELLO'|capitalize }} {{ 5|upper }} {{ ' a '|trim }}|{{ 'xax'|trim('x') }}|{{ 7|string }} {{ [1]|string }} {{ none|string }}
{{ [1, 2]|length }} {{ s|length }} {{ s|count }} {{ u|length }}
{{ 5|length }}
{{ (l|map('string'))|length }}
{{ l|first }} {{ l|last }} {{ s|first }} {{ s|last }} [{{ el|first }}] [{{ el|last }}] {{ d|first }} {{ d|last }}
{{ l|sort }} {{ l|sort(reverse=true) }} {{ w|sort }} {{ w|sort(case_sensitive=true) }} {{ p|sort(attribute='v', reverse=true)|map(attribute='n')|list }} {{ p|sort(attribute='g,n')|map(attribute='n')|join }} {{ 'bca'|sort }} {{ d|sort }}
{{ [1, 'a']|sort }}
{{ l|reverse|list }} {{ s|reverse }} {{ l|list|reverse|join('-') }}
{{ l|join }} {{ l|join(', ') }} {{ p|join('|', attribute='n') }} {{ 'abc'|join('.') }} {{ [1, none, true, 'x']|join(',') }} {{ []|join(',') }}
{{ l|sum }} {{ p|sum(attribute='v') }} {{ []|sum }} {{ [1.5, 2]|sum }} {{ [1]|sum(start=10) }} {{ [[1], [2]]|sum(start=[]) }}
{{ ['a', 'b']|sum }}
{{ l|min }} {{ l|max }} {{ w|min }} {{ w|max }} [{{ el|min }}] {{ p|max(attribute='v') }} {{ 'bca'|min }}
{{ w|unique|list }} {{ w|unique(case_sensitive=true)|list }} {{ [1, 1.0, true, 2]|unique|list }} {{ p|unique(attribute='g')|map(attribute='n')|list }}
{% for g in p|groupby('g') %}{{ g.grouper }}:{{ g.list|map(attribute='n')|join(',') }};{% endfor %}{% for k, v in p|groupby('g') %}{{ k }}{{ v|length }}{% endfor %}{{ (p|groupby('n'))[0] }}
{{ [{'k': 'B'}, {'k': 'a'}, {'k': 'b'}]|groupby('k') }} {{ [{'k': 1}, {}]|groupby('k', default=0) }}
{{ [1, 2, 3, 4, 5]|batch(2)|list }} {{ [1, 2, 3]|batch(2, 'x')|list }} {{ [1, 2, 3, 4, 5]|slice(2)|list }} {{ [1, 2, 3, 4]|slice(3, 'x')|list }} {{ [1, 2]|slice(2, 'x')|list }}
{{ l|map('string')|list }} {{ p|map(attribute='v')|list }} {{ p|map(attribute='q', default='z')|list }} {{ w|map('upper')|join(' ') }} {{ w|map('replace', 'p', 'q')|list }} {{ [' a ']|map('trim')|list }} {{ d.items()|map('first')|list }} {{ p|map(attribute='n.0')|list }} {{ l|map('default', 5)|list }}
{{ l|map|list }}
{{ l|map('nofilter')|list }}
{{ l|select|list }} {{ [0, 1, '', 'a']|select|list }} {{ l|select('odd')|list }} {{ l|reject('odd')|list }} {{ l|select('gt', 1)|list }} {{ l|select('>', 1)|list }} {{ w|select('in', ['fig'])|list }} {{ [none, 1]|reject('none')|list }} {{ ['a', nothing]|select('defined')|list }}
{{ p|selectattr('g', 'equalto', 1)|map(attribute='n')|list }} {{ p|selectattr('g')|list|length }} {{ p|rejectattr('g', '==', 1)|map(attribute='n')|list }} {{ messages|selectattr('role', 'in', ['user', 'tool'])|list|length }} {{ messages|selectattr('tool_calls', 'defined')|list|length }} {{ messages|rejectattr('content')|list|length }}
{{ (messages|selectattr('role', '==', 'system')|list)[0].content }} {{ messages|map(attribute='role')|join(',') }} {{ (messages|last).role }} {{ messages|map(attribute='content')|select('string')|list|length }}
{% set g = l|map('string') %}{{ g|join }}{{ g|join }}|{% set g = l|select('odd') %}{{ g|first }}{{ g|list }}
{{ l|map('string') is iterable }} {{ l|map('string') is sequence }} {{ (el|map('string')) and 'yes' }}
{{ -5|abs }} {{ (-5)|abs }} {{ 2.5|abs }} {{ '42'|int }} {{ '4.9'|int }} {{ 'x'|int }} {{ 'x'|int(9) }} {{ '0x1A'|int(base=16) }} {{ '101'|int(0, 2) }} {{ 3.99|int }} {{ true|int }} {{ none|int }} {{ ' 5 '|int }} {{ '1e3'|int }} {{ '1_000'|int }} {{ '-7'|int }} {{ '0b11'|int(base=0) }}
{{ '3.5'|float }} {{ 'x'|float }} {{ 'x'|float(1.5) }} {{ 3|float }} {{ '1e5'|float }} {{ ' 2 '|float }} {{ 'inf'|float }} {{ 'nan'|float }} {{ '-inf'|float }} {{ none|float }}
{{ 2.5|round }} {{ 3.5|round }} {{ 2.675|round(2) }} {{ 42.55|round(1) }} {{ 42.55|round(1, 'floor') }} {{ 42.51|round(1, 'ceil') }} {{ 42|round }} {{ 42.5|round|int }} {{ -2.5|round }} {{ 1234.5|round(-2) }} {{ 1250|round(-2) }} {{ 0.5|round }} {{ 1.5|round }} {{ 5|round(1, 'floor') }}
{{ '3'|abs }}
{{ 'a'|round }}
{{ 'aXbX'|replace('X', '-') }} {{ 'aXbX'|replace('X', '-', 1) }} {{ 123|replace('2', 'x') }} {{ 'abc'|replace('b', none) }} {{ 'a.b'|replace('.', '\n') }} {{ 'x'|replace(1, 2) }}
{{ m|indent }}|{{ m|indent(2) }}|{{ m|indent(2, true) }}|{{ m|indent(2, true, true) }}|{{ m|indent(width='> ') }}|{{ 'a'|indent }}|{{ ''|indent }}|{{ 'a\n'|indent(first=true) }}|{{ 'a\nb'|indent(-3) }}
{{ 'foo bar baz qux'|truncate(9) }} {{ 'foo bar baz qux'|truncate(9, true) }} {{ 'foo bar baz qux'|truncate(11) }} {{ 'foo bar baz qux'|truncate(11, false, '..', 0) }} {{ 'foo'|truncate(5) }}
{{ 'a b c'|wordcount }} {{ 'a-b, c_d'|wordcount }} {{ 'ab'|center(6) }}| {{ '<a>&"\''|escape }} {{ '<'|e }} {{ 'a'|safe }} {{ 'x'|forceescape }}
{{ 'aaa bbb ccc ddd'|wordwrap(7) }}|{{ 'aaaaaaaaaa b'|wordwrap(4) }}|{{ 'a\nb c'|wordwrap(20) }}
{{ 1000|filesizeformat }} {{ 1|filesizeformat }} {{ 123456789|filesizeformat }} {{ 1024|filesizeformat(true) }} {{ 10|filesizeformat }}
{{ 'a b/c?é'|urlencode }} {{ {'a': 1, 'b': 'x y'}|urlencode }} {{ {'a': 1, 'b': none, 'c': '<'}|xmlattr }}
{{ d|dictsort }} {{ {'b': 1, 'A': 2}|dictsort }} {{ {'b': 1, 'A': 2}|dictsort(true) }} {{ {'b': 1, 'a': 2}|dictsort(by='value') }} {{ {'b': 1, 'a': 2}|dictsort(false, 'key', true) }}
{{ d|attr('get') is callable }} [{{ d|attr('b') }}] {{ d|items|list }}
{{ l|nofilter }}
{{ l is notest }}
{% if false %}{{ l|nofilter }}{% endif %}ok
{{ d|tojson }} {{ l|tojson }} {{ s|tojson }} {{ none|tojson }} {{ true|tojson }} {{ 1.0|tojson }} {{ (1, 2)|tojson }} {{ u|tojson }} {{ '<>&"\'\\/\n\t\x01\x7f'|tojson }} {{ {1: 2, none: 3, true: 4, 1.5: 5}|tojson }} {{ []|tojson }} {{ {}|tojson }} {{ 1e16|tojson }} {{ big|tojson }}
{{ d|tojson(indent=2) }} {{ d|tojson(indent=0) }} {{ []|tojson(indent=2) }} {{ {'a': [], 'b': {}}|tojson(indent=1) }} {{ l|tojson(indent='\t') }} {{ d|tojson(indent=none) }}
{{ d|tojson(separators=(',', ':')) }} {{ d|tojson(separators=[', ', ': '], indent=2) }} {{ d|tojson(sort_keys=true) }} {{ u|tojson(ensure_ascii=true) }} {{ u|tojson(true) }} {{ '😀'|tojson(ensure_ascii=true) }} {{ u|tojson(ensure_ascii=false) }} {{ d|tojson(true, 1, none, true) }} {{ '\x7f'|tojson(true) }}
{{ nothing|tojson }}
{{ d.items()|tojson }}
{{ d.items()|list|tojson }} {{ 'nan'|float|tojson }} {{ 'inf'|float|tojson }}
{{ d|tojson(foo=1) }}
{{ {(1, 2): 3}|tojson }}
{{ {'b': 1, 3: 2}|tojson(sort_keys=true) }}
{{ tools|tojson }} {{ tools[0].function|tojson(indent=4) }} {{ messages[2].tool_calls[0].function.arguments|tojson }}
{{ i is odd }} {{ i is even }} {{ i is divisibleby 7 }} {{ i is divisibleby(2) }} {{ i is number }} {{ f is number }} {{ t is number }} {{ t is integer }} {{ i is integer }} {{ f is float }} {{ t is boolean }} {{ t is true }} {{ t is false }} {{ no is none }} {{ s is string }} {{ l is sequence }} {{ d is mapping }} {{ d is sequence }} {{ s is sequence }} {{ s is iterable }} {{ i is iterable }} {{ nothing is iterable }} {{ nothing is sequence }} {{ none is iterable }}
{{ 'a' is lower }} {{ 'A' is upper }} {{ 'a1' is lower }} {{ '1' is lower }} {{ i is eq 7 }} {{ i is ne(7) }} {{ i is lt 8 }} {{ i is ge 7 }} {{ i is in [7] }} {{ i is not in [7] }} {{ none is sameas none }} {{ 1 is sameas true }} {{ 1 is sameas 1 }} {{ range is callable }} {{ s is callable }} {{ 'upper' is filter }} {{ 'nope' is filter }} {{ 'odd' is test }} {{ s is escaped }} {{ i is not none }} {{ i is defined and i is odd }} {{ i is equalto 7 }} {{ i is not defined or true }}
{{ 'a' is odd }}
{{ 2.0 is even }} {{ 3.0 is odd }} {{ 2.5 is odd }} {{ true is odd }} {{ d.keys() is sequence }} {{ d.keys() is iterable }} {{ range(3) is sequence }} {{ namespace() is mapping }}
{% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }}{{ loop.depth0 }}{{ loop.previtem.role if loop.previtem }}{{ loop.nextitem.role if loop.nextitem is defined }}{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) }};{% endfor %}
{% for x in l if x > 1 %}{{ x }}{{ loop.index }}{{ loop.last }}{{ loop.length }}{% else %}none{% endfor %}|{% for x in l if x > 9 %}x{% else %}none{% endfor %}
{% for x in [1, 2, 3, 4] %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 4 %}{% break %}{% endif %}{{ x }}{% endfor %}{% for x in [1] %}{% break %}{% else %}e{% endfor %}
{% set n = namespace(found=false) %}{% for x in [1, 2, 3] if not n.found %}{{ x }}{% set n.found = x == 2 %}{% endfor %}{{ n.found }}
{% set x = 1 %}{% for y in [1, 2] %}{% set x = x + y %}{{ x }}{% endfor %}{{ x }}
{% set x = 1 %}{% for y in [1, 2] %}{{ x }}{% set x = 5 %}{{ x }}{% endfor %}{{ x }}
{% set x = 1 %}{% if true %}{% set x = 2 %}{% endif %}{{ x }}{% with x = 3, y = x %}{{ x }}{{ y }}{% set x = 4 %}{{ x }}{% endwith %}{{ x }}
{% set ns = namespace(a=1, b='x') %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ ns.b }}{{ ns.c }}{{ ns['a'] }}{% set ns = namespace({'q': 1}, r=2) %}{{ ns.q }}{{ ns.r }} {{ ns }}
{% set s2.x = 1 %}
{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set (c, q), r = [1, 2], 3 %}{{ c }}{{ q }}{{ r }}{% set z = 1, 2 %}{{ z }}
{% set a, b = [1] %}
{% set x %}a {{ 1 + 1 }} b{% endset %}{{ x }}|{% set y | upper | trim %} ab {% endset %}{{ y }}|{{ x|length }}
{% filter upper %}a{{ s }}{% endfilter %}{% filter replace('a', 'b') | upper %}aXa{% endfilter %}
{% macro m(a, b=2, c=b) %}[{{ a }}{{ b }}{{ c }}]{% endmacro %}{{ m(1) }}{{ m(1, 3) }}{{ m(a=5, c=6) }}{{ m() }}{{ m(1)|length }}
{% macro m(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, 3, x=4) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(b=2) }}
{% macro m() %}<{{ caller() }}>{% endmacro %}{% call m() %}in{% endcall %}{% macro k(x) %}{{ caller(x, 2) }}{% endmacro %}{% call(a, b) k(1) %}{{ a }}-{{ b }}{% endcall %}
{% macro m() %}{{ y }}{% endmacro %}{% set y = 3 %}{{ m() }}{% for y in [9] %}{{ m() }}{% endfor %}
{% macro fact(n) %}{{ 1 if n < 2 else n * (fact(n - 1)|int) }}{% endmacro %}{{ fact(5) }}
{% macro a() %}{% set v = 1 %}{{ v }}{% endmacro %}{{ a() }}{{ v }}{{ a.name }}
{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{{ loop.depth }}{% endif %}{% endfor %}
{% for a, b in [(1, 2), [3, 4]] %}{{ a }}{{ b }}{% endfor %}{% for a, (b, c) in [[1, [2, 3]]] %}{{ a }}{{ b }}{{ c }}{% endfor %}{% for c in 'ab' %}{{ c }}.{% endfor %}
{% for a, b in [1] %}{% endfor %}
{% for x in 5 %}{% endfor %}
{% for x in range(3) %}{{ x }}{% endfor %}{% for x in range(5, 0, -2) %}{{ x }}{% endfor %}{{ range(3) }}{{ range(3)|list }}{{ range(0)|list }}{{ range(1, 4)|sum }}{{ range(2, 8, 3)|list }}
{{ range(100001)|length }}
{{ range(1, 2, 0) }}
{{ range('a') }}
{{ dict(a=1, b=2) }} {{ dict([('x', 1)]) }} {{ dict({'a': 1}, b=2) }} {{ dict() }}
{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }}{{ c.reset() }}{{ c.next() }}{% set j = joiner('|') %}{{ j() }}{{ j() }}{{ joiner()() }}
{% generation %}said{% endgeneration %}{% for m in messages %}{% generation %}{{ m.role }}{% set q = 1 %}{% endgeneration %}{{ q }}{% endfor %}
{{ raise_exception('no ' ~ i) }}
{{ strftime_now('%Y-%m-%d') }} {{ strftime_now('%d %b %Y') }} {{ strftime_now('%A %B %H:%M:%S %j %y %p %I %%') }} {{ strftime_now('%-d %-m %e') }} {{ strftime_now('%D %F %T %R') }} {{ strftime_now('%u %w %U %W %V %G %C') }} {{ strftime_now('%c|%x|%X|%n|%t|%Z|%z|%f|%h|%s') }} {{ strftime_now('%-I:%M %p') }}
{{ strftime_now(1) }}
{% if 1 %}a{% elif 1/0 %}b{% else %}c{% endif %}{% if 0 %}a{% elif 1 %}b{% endif %}{% if not 1 %}x{% endif %}{% if e %}e{% elif el %}el{% elif ed %}ed{% elif no %}no{% else %}else{% endif %}
{%- if true -%} a {%- endif %} b {{- ' c ' -}} d
  {% if true %}  
 x
  {% endif %}  
y
a{# comment #}b{#- c -#} d {# multi
line #}
e
  {#+ kept #}f
  {%+ if true %}k{% endif +%}
l
{% raw %}{{ x }}{% y %}{# z #}{% endraw %} {%- raw -%}  {{ a }}  {%- endraw -%}  z
{{ '{{' }} {{ "{%" }} {{ '}}' }} {{ {'a': {'b': 1}}['a']['b'] }} {{ {'a':1}|length }}
{{ [1,
 2]
}} {{ 'a'
~ 'b' }}
{{ i if i > 5 else 'small' }}{{ (i, f)[0] }}{{ [i, f][1] }}{{ {'k': i}.k }}{{ 'abc'[1] }}{{ 'abc'.upper()[0] }}{{ 'a b'.split()[1] }}{{ (1 + 2)|string + 'x' }}{{ -1|abs }}{{ 1 + 2|abs }}{{ 'a'|upper ~ 'b' }}{{ not i is odd }}
{{ l|length > 2 and l|first == 3 }} {{ l|length - 1 }} {{ (l|length) * 2 }} {{ 'x' * l|length }} {{ l[l|length - 1] }} {{ messages|length % 2 == 0 }}
{{ d.items()|list|first }} {{ d|list|join(',') }} {{ d.values()|map('string')|list|length }} {{ (d.items()|list)[0][1] }} {{ ['a', 'b']|map('upper')|list|tojson }}
{% set content = messages[4].content %}{% if '</think>' in content %}{{ content.split('</think>')[-1].lstrip('\n') }}|{{ content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') }}{% endif %}
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['content'] is string %}{{ message['content'] | trim }}{% endif %}{% if message.tool_calls %}{% for tc in message.tool_calls %}{{ '{"name": "' + tc.function.name + '", "arguments": ' }}{{ tc.function.arguments | tojson }}{{ '}' }}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}
{% for t in tools %}{{ t.function.name }}: {{ t.function.parameters.properties.items() | list | length }}{% for k, v in t.function.parameters.properties.items() %}{{ k }}:{{ v.type }}{{ '?' if k not in t.function.parameters.required }}{{ ' ' ~ v.enum|join('/') if v.enum }}{% endfor %}{% endfor %}
{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% endif %}{{ system }}{{ loop_messages|length }}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}!{% endif %}{% endfor %}
{{ messages[1]['content'].strip() + eos_token + bos_token }}{{ documents is none }}{{ tools is not none }}{{ add_generation_prompt }}{{ messages[2].content is none }}{{ messages[2]['content'] or 'empty' }}
{{ 'a' if messages[0].role == 'system' and (messages[0].content or '')|length > 3 else 'b' }}{{ messages[:2]|length }}{{ messages[::-1][0].role }}{{ (messages|selectattr('role', 'equalto', 'user')|list)[-1].content|trim }}
{% print 1, 2 %}{% print 'x' %}
{% block b %}x{% endblock %}
{% include 'x' %}
{% unknown %}
{% if 1 %}
{{ 1
{{ 'a }}
{{ 1 + }}
{{ a b }}
{{ (1 }}
{{ 1) }}
{% endif %}
{% for x in l %}{% endif %}
{{ }}
{% %}
{{ x = 1 }}
{% set 1 = 2 %}
{% set true = 2 %}
{% break %}
{{ 1 is 2 is 3 }}
{{ @ }}
{{ a..b }}
{{ f(**d, 1) }}
{{ dict(**{'a': 1}, **{'b': 2}) }}
{{ dict(*[[('a', 1)]]) }} {{ range(*[1, 3])|list }} {{ dict(**{'a': 1}) }} {{ '{}{}'.format(*['x', 'y']) }} {{ '{a}'.format(**{'a': 'z'}) }}
{{ messages[0]('x') }}
{{ nothing() }}
{{ none() }}
{{ s.nothing() }}
{{ d.nothing() }}
{{ loop }}{{ loop is defined }}{% for x in [1] %}{{ loop is defined }}{% endfor %}
{% for x in l %}{{ 'last' if loop.last else loop.nextitem }}{{ ',' if not loop.last }}{% endfor %}{% for x in [] %}{% else %}{{ x }}e{% endfor %}
{% for k in d if d[k] is number %}{{ k }}{% endfor %}{% for c in u %}[{{ c }}]{% endfor %}{% for x in l|sort %}{{ x }}{% endfor %}{% for x in (1, 2) %}{{ x }}{% endfor %}{% for x in 1, 2 %}{{ x }}{% endfor %}
{{ 'é'|length }}{{ 'é'[0] }}{{ '😀a'[1] }}{{ '你好'|upper }}{{ '你' ~ '好' }}{{ 'ŉ'.upper() }}
{{ true|string }}{{ true ~ '' }}{{ [true, none] }}{{ true|tojson }}{{ (not true)|string }}{{ [1.0, 1e20, -0.5]|join(' ') }}{{ 1.0 == 1 }}{{ 100000000000000000000 }}{{ 1.10 }}
{{ '%s' % true }}{{ '%d' % true }}{{ '%s' % 1.0 }}{{ '{}'.format(1e20) }}{{ '%.0f' % 2.5 }}{{ '%.3g' % 1234.5 }}{{ '{:.0f}'.format(0.5) }}{{ '{:g}'.format(100000) }}{{ '{:g}'.format(1000000) }}{{ '{:e}'.format(0) }}
{{ ["a", "b"] is sequence }}{{ ("a" ~ "b") is string }}{{ 1 if "a" is string else 2 }}{{ x is defined }}{{ x is not defined }}{{ (x is defined) or true }}{{ messages is iterable and messages is not mapping }}
{{ i.bit_length() }}{{ f.is_integer() }}{{ 1.0.is_integer() }}
{{ l|sort|first }}{{ l|sort(true)|first }}{{ (l|sort)[0] }}{{ l|map('string')|sort|join }}{{ l|list == l }}{{ (l|sort|list)[::-1] }}
{{ s|batch(2)|map('join')|list }}{{ s|list }}{{ d.c.x|map('string')|join('+') }}{{ [[1, 2], [3]]|map('length')|list }}{{ [[1, 2], [3]]|map('first')|list }}{{ [[3, 1]]|map('sort')|list }}{{ ['a b']|map('split')|list }}
{{ [1, 2, 3]|select('in', [1, 3])|list }}{{ [{'a': {'b': 1}}]|map(attribute='a.b')|list }}{{ [{'a': [5, 6]}]|map(attribute='a.1')|list }}{{ ['1', 'x']|map('int', default=9)|list }}{{ [1, 2]|map('format', 3)|list }}
{{ {'a': 1}.items()|map(attribute=0)|list }}{{ [[1, 2]]|map(attribute=1)|list }}{{ [(1, 'b'), (2, 'a')]|sort(attribute=1) }}{{ [(1, 'b'), (2, 'a')]|sort(attribute='1') }}
"""
SNIPPETS = [s for s in SNIPPETS.strip("\n").split("\n")]
SNIPPETS += ["  {% if true %}  \n x\n  {% endif %}  \ny\n", "a\n  {# c #}\nb {# d #} \n{#- e -#}\n f\n", "a\n  {%+ if true %}k{% endif +%}\nl\n\n", "{% for x in l %}\n{{ x }}\n{% endfor %}\n",
             "{%- for x in l -%}\n  {{ x }}\n{%- endfor -%}\n", "a\r\nb{{ 'x\r\ny' }}\r\n", "{% set x %}\n a\n{% endset %}\n[{{ x }}]", "{{ x }}\n\n", "\n{{ s }}\n", "{% raw %}\n {{ a }}\n{% endraw %}\nb",
             "{% if true %}\n\n a{% endif %}\n", "\t{% if true %}\n\ta\n\t{%- endif %}\n", "a {%- if true %} b {% endif -%} c", "{{ s -}}  \n  {{ s }}", "x {{- s }}", "{# a #}\n{# b #}\nc", "{% macro m() %}\n  hi\n{% endmacro %}\n{{ m() }}",
             "{%\n if true\n%}a{%\nendif\n%}", "{{ [\n1,\n2,\n] }}", "{{ {\n'a': 1,\n} }}", "{{- s -}}\n", "{{ s }}{% if true -%}\n   a\n   {%- endif %}\n", "{{ '\\\n' }}|{{ 'a\\\nb' }}", "{{ \"a\n b\" }}"]
