"""Chat templates with the structure of those of fifty well-known models: the same Jinja constructs in the
same places, written again.
"""

ADD = {"type": "function", "function": {"name": "add", "description": "Adds two numbers.", "parameters": {"type": "object", "properties": {
    "a": {"type": "number", "description": "First"}, "b": {"type": "array", "items": {"type": "string"}, "enum": ["x", "y"]}}, "required": ["a"]}}}
CALL = {"id": "abcdef123", "type": "function", "function": {"name": "add", "arguments": {"a": 1.5, "b": ["x", "\u00e9 <b>"]}}}


def chats():
    user = {"role": "user", "content": " What is \u4f60\u597d?\n"}
    said = {"role": "assistant", "content": "<think>\nHm, \"greeting\".\n</think>\n\nHello!"}
    system = {"role": "system", "content": "Be brief.\n"}
    called = [{**user, "content": "Add."}, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": '{"sum": 3}', "tool_call_id": "abcdef123", "name": "add"}]
    return [
        {"messages": [user], "add_generation_prompt": True},
        {"messages": [system, user, said, {"role": "user", "content": "Bye"}], "add_generation_prompt": True},
        {"messages": [user, {"role": "assistant", "content": "Hi", "reasoning_content": "so"}], "add_generation_prompt": False},
        {"messages": [system, *called], "tools": [ADD], "add_generation_prompt": True},
        {"messages": [*called, {"role": "assistant", "content": "It is 3."}, user], "tools": [ADD], "add_generation_prompt": True, "extra": {"enable_thinking": False}},
        {"messages": [user, user], "add_generation_prompt": True, "extra": {"enable_thinking": True, "reasoning_effort": "high"}},
        {"messages": [], "add_generation_prompt": True},
    ]


def chatml(before="", default=None, end="<|im_end|>", begin="<|im_start|>", content="message['content']", generation="assistant"):
    system = "{%% if loop.first and messages[0]['role'] != 'system' %%}{{ '%ssystem\\n%s%s\\n' }}{%% endif %%}" % (begin, default, end) if default else ""
    return before + "{% for message in messages %}" + system + "{{ '" + begin + "' + message['role'] + '\\n' + " + content + " + '" + end + "' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '" + begin + generation + "\\n' }}{% endif %}"


def zephyr(marks, space="\n", end="{{ eos_token }}"):
    return "{% for message in messages %}\n" + "".join("{%% %s message['role'] == '%s' %%}\n{{ '%s%s' + message['content'] }}%s\n" % ("if" if i == 0 else "elif", r, m, space.replace("\n", "\\n"), end if r == "assistant" else "") for i, (r, m) in enumerate(marks)) + "{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '" + dict(marks)["assistant"] + "' }}\n{% endif %}\n{% endfor %}"


def mistral(tools=False, system="first", space=" "):
    head = "{{- bos_token }}\n{%- if messages and messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}\n"
    if tools: head += "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}\n{%- set user_messages = loop_messages | selectattr('role', 'equalto', 'user') | list %}\n"
    check = "{%- set ns = namespace(index=0) %}{%- for message in loop_messages %}{%- if not (message.role == 'tool' or (message.tool_calls is defined and message.tool_calls is not none)) %}{%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('roles must alternate: ' ~ message.role) }}{%- endif %}{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}\n"
    user = "{%- if tools is not none and (message == user_messages[-1]) %}{{- '[AVAILABLE_TOOLS]" + space + "[' }}{%- for tool in tools %}{%- set tool = tool.function %}{{- '{\"type\": \"function\", \"function\": {' }}{%- for key, val in tool.items() if key != 'return' %}{%- if val is string %}{{- '\"' + key + '\": \"' + val + '\"' }}{%- else %}{{- '\"' + key + '\": ' + val|tojson }}{%- endif %}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- '}}' }}{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' }}{%- endif %}{%- endfor %}{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}" if tools else ""
    place = "{%- if loop." + system + " and system_message is defined %}{{- '[INST]" + space + "' + system_message + '\\n\\n' + message['content'] + '[/INST]' }}{%- else %}{{- '[INST]" + space + "' + message['content'] + '[/INST]' }}{%- endif %}"
    calls = "{%- elif message.tool_calls is defined and message.tool_calls is not none %}{{- '[TOOL_CALLS] [' }}{%- for tool_call in message.tool_calls %}{%- set out = tool_call.function|tojson %}{{- out[:-1] }}{%- if not tool_call.id is defined or tool_call.id|length != 9 %}{{- raise_exception('ids have 9 characters') }}{%- endif %}{{- ', \"id\": \"' + tool_call.id + '\"}' }}{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' + eos_token }}{%- endif %}{%- endfor %}{%- elif message.role == 'tool_results' or message.role == 'tool' %}{%- if message.content is defined and message.content.content is defined %}{%- set content = message.content.content %}{%- else %}{%- set content = message.content %}{%- endif %}{{- '[TOOL_RESULTS] {\"content\": ' + content|string + ', ' }}{{- '\"call_id\": \"' + message.tool_call_id + '\"}[/TOOL_RESULTS]' }}" if tools else ""
    return head + check + "{%- for message in loop_messages %}{%- if message['role'] == 'user' %}" + user + place + calls + "{%- elif message['role'] == 'assistant' %}{{- '" + space + "' + message['content']|trim + eos_token }}{%- else %}{{- raise_exception('only user and assistant roles') }}{%- endif %}{%- endfor %}\n"


def llama3(tools=False, date=False, strip="| trim"):
    turn = "{%- for message in messages %}{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] " + strip + " + '<|eot_id|>' }}"
    calls = "{%- elif 'tool_calls' in message %}{%- if not message.tool_calls|length == 1 %}{{- raise_exception('only single calls') }}{%- endif %}{%- set tool_call = message.tool_calls[0].function %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{{- '{\"name\": \"' + tool_call.name + '\", ' }}{{- '\"parameters\": ' }}{{- tool_call.arguments | tojson }}{{- '}' }}{{- '<|eot_id|>' }}{%- elif message.role == 'tool' or message.role == 'ipython' %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}{{- '<|eot_id|>' }}"
    head = "{{- bos_token }}\n{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}\n{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}\n"
    if date: head += "{%- if not date_string is defined %}{%- if strftime_now is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}{%- endif %}\n"
    head += "{%- if messages and messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}{%- else %}{%- set system_message = '' %}{%- endif %}\n{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}" + ("{{- 'Today Date: ' + date_string + '\\n\\n' }}" if date else "")
    if tools: head += "{%- if builtin_tools is defined or tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}{%- if builtin_tools is defined %}{{- 'Tools: ' + builtin_tools | reject('equalto', 'code_interpreter') | join(', ') + '\\n\\n' }}{%- endif %}"
    head += "{{- system_message }}{{- '<|eot_id|>' }}\n"
    if tools: head += "{%- if tools_in_user_message and not tools is none %}{%- if messages | length != 0 %}{%- set first_user_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}{%- else %}{{- raise_exception('no first user message') }}{%- endif %}{{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}{{- first_user_message + '<|eot_id|>' }}{%- endif %}\n"
    return head + turn + (calls if tools else "") + "{%- endif %}{%- endfor %}\n{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}\n"


def gemma(system="merge", turn="model", tools=False):
    head = {"merge": "{{ bos_token }}{%- if messages and messages[0]['role'] == 'system' -%}{%- if messages[0]['content'] is string -%}{%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}{%- else -%}{%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}{%- endif -%}{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set first_user_prefix = '' -%}{%- set loop_messages = messages -%}{%- endif -%}",
            "refuse": "{{ bos_token }}{% if messages and messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% set loop_messages = messages %}{% set first_user_prefix = '' %}"}[system]
    return head + "{%- for message in loop_messages -%}{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif -%}{%- if (message['role'] == 'assistant') -%}{%- set role = '" + turn + "' -%}{%- else -%}{%- set role = message['role'] -%}{%- endif -%}{{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else '') }}{%- if message['content'] is string -%}{{ message['content'] | trim }}{%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}{%- else -%}{{ raise_exception('Invalid content type') }}{%- endif -%}{{ '<end_of_turn>\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{'<start_of_turn>" + turn + "\n'}}{%- endif -%}\n"


QWEN_TOOLS = "{{- \"# Tools\\n\\nSignatures are within <tools></tools>:\\n<tools>\" }}{%- for tool in tools %}{{- \"\\n\" }}{{- tool | tojson }}{%- endfor %}{{- \"\\n</tools>\\n\\nAnswer with <tool_call>\\n{\\\"name\\\": <name>, \\\"arguments\\\": <json>}\\n</tool_call><|im_end|>\\n\" }}"


def qwen(thinking=None, default="You are helpful."):
    head = "{%- if tools %}\n    {{- '<|im_start|>system\\n' }}\n    {%- if messages and messages[0].role == 'system' %}\n        {{- messages[0].content + '\\n\\n' }}\n    {%- endif %}\n    " + QWEN_TOOLS + "\n{%- else %}\n    {%- if messages and messages[0].role == 'system' %}\n        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}\n" + ("    {%%- else %%}\n        {{- '<|im_start|>system\\n%s<|im_end|>\\n' }}\n" % default if default else "") + "    {%- endif %}\n{%- endif %}\n"
    if thinking: head += "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}\n{%- for message in messages[::-1] %}\n    {%- set index = (messages|length - 1) - loop.index0 %}\n    {%- if ns.multi_step_tool and message.role == \"user\" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}\n        {%- set ns.multi_step_tool = false %}\n        {%- set ns.last_query_index = index %}\n    {%- endif %}\n{%- endfor %}\n"
    assistant = "{%- set content = message.content if message.content is string else '' %}{%- set reasoning_content = '' %}{%- if message.reasoning_content is string %}{%- set reasoning_content = message.reasoning_content %}{%- elif '</think>' in content %}{%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}{%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}{{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}{%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}" if thinking else "{{- '<|im_start|>' + message.role }}{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}"
    tail = "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n" + ("    {%- if enable_thinking is defined and enable_thinking is false %}\n        {{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}\n" if thinking == "hybrid" else "    {{- '<think>\\n' }}\n" if thinking else "") + "{%- endif %}\n"
    return head + "{%- for message in messages %}\n    {%- if (message.role == \"user\") or (message.role == \"system\" and not loop.first) %}\n        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n    {%- elif message.role == \"assistant\" %}\n        " + assistant + "\n        {%- if message.tool_calls %}{%- for tool_call in message.tool_calls %}{%- if (loop.first and message.content) or (not loop.first) %}{{- '\\n' }}{%- endif %}{%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}{{- '<tool_call>\\n{\"name\": \"' }}{{- tool_call.name }}{{- '\", \"arguments\": ' }}{%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}{{- '}\\n</tool_call>' }}{%- endfor %}{%- endif %}\n        {{- '<|im_end|>\\n' }}\n    {%- elif message.role == \"tool\" %}\n        {%- if loop.first or (messages[loop.index0 - 1].role != \"tool\") %}{{- '<|im_start|>user' }}{%- endif %}{{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}{%- if loop.last or (messages[loop.index0 + 1].role != \"tool\") %}{{- '<|im_end|>\\n' }}{%- endif %}\n    {%- endif %}\n{%- endfor %}\n" + tail


def deepseek(thinking=False, distill=False):
    return "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='', is_first_sp=true) %}{%- for message in messages %}{%- if message['role'] == 'system' %}{%- if ns.is_first_sp %}{% set ns.system_prompt = ns.system_prompt + message['content'] %}{% set ns.is_first_sp = false %}{%- else %}{% set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}{%- endif %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system_prompt }}{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{'<\uff5cUser\uff5c>' + message['content']}}{%- endif %}{%- if message['role'] == 'assistant' and 'tool_calls' in message %}{%- set ns.is_tool = false -%}{%- for tool in message['tool_calls'] %}{%- if not ns.is_first %}{{'<\uff5cAssistant\uff5c><\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>' + tool['type'] + '<\uff5ctool\u2581sep\uff5c>' + tool['function']['name'] + '\\n' + '```json' + '\\n' + tool['function']['arguments']|tojson + '\\n' + '```' + '<\uff5ctool\u2581call\u2581end\uff5c>'}}{%- set ns.is_first = true -%}{%- else %}{{'\\n' + '<\uff5ctool\u2581call\u2581begin\uff5c>' + tool['type']}}{%- endif %}{%- endfor %}{{'<\uff5ctool\u2581calls\u2581end\uff5c><\uff5cend\u2581of\u2581sentence\uff5c>'}}{%- endif %}{%- if message['role'] == 'assistant' and 'tool_calls' not in message %}{%- if ns.is_tool %}{{'<\uff5ctool\u2581outputs\u2581end\uff5c>' + message['content'] + '<\uff5cend\u2581of\u2581sentence\uff5c>'}}{%- set ns.is_tool = false -%}{%- else %}{% set content = message['content'] %}" + ("{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}" if thinking or distill else "") + "{{'<\uff5cAssistant\uff5c>' + content + '<\uff5cend\u2581of\u2581sentence\uff5c>'}}{%- endif %}{%- endif %}{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}{%- if ns.is_output_first %}{{'<\uff5ctool\u2581outputs\u2581begin\uff5c>' + message['content'] + '<\uff5ctool\u2581output\u2581end\uff5c>'}}{%- set ns.is_output_first = false %}{%- else %}{{'\\n<\uff5ctool\u2581output\u2581begin\uff5c>' + message['content']}}{%- endif %}{%- endif %}{%- endfor -%}{% if ns.is_tool %}{{'<\uff5ctool\u2581outputs\u2581end\uff5c>'}}{% endif %}{% if add_generation_prompt and not ns.is_tool %}{{'<\uff5cAssistant\uff5c>" + ("<think>\\n" if distill else "") + "'}}{% endif %}"


HARMONY = """{#- Types of parameters in the manner of TypeScript. -#}
{%- macro type_of(spec, required) -%}
    {%- if spec.type == 'array' -%}
        {%- if spec['items'] -%}{{- type_of(spec['items'], required) + '[]' -}}{%- else -%}{{- 'any[]' -}}{%- endif -%}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string and spec.type is not mapping and spec.type[0] is defined -%}
        {{- spec.type | join(' | ') -}}
    {%- elif spec.oneOf -%}
        {%- for variant in spec.oneOf -%}{{- type_of(variant, required) -}}{%- if not loop.last -%}{{- ' | ' -}}{%- endif -%}{%- endfor -%}
    {%- elif spec.enum -%}{{- '"' + spec.enum|join('" | "') + '"' -}}
    {%- elif spec.type == 'object' -%}
        {%- if spec.properties -%}{{- '{\\n' -}}{%- for name, prop in spec.properties.items() -%}{{- name -}}{%- if name not in (spec.required or []) -%}{{- '?' -}}{%- endif -%}{{- ': ' -}}{{ type_of(prop, spec.required or []) }}{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}{%- endfor -%}{{- '}' -}}{%- else -%}{{- 'object' -}}{%- endif -%}
    {%- else -%}{{- spec.type or 'any' -}}
    {%- endif -%}
{%- endmacro -%}
{%- macro namespace_of(name, tools) -%}
    {{- '## ' + name + '\\n\\nnamespace ' + name + ' {\\n\\n' }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- '// ' + tool.description + '\\ntype ' + tool.name + ' = ' }}
        {%- if tool.parameters and tool.parameters.properties %}
            {{- '(_: {\\n' }}
            {%- for name, spec in tool.parameters.properties.items() %}
                {%- if spec.description %}{{- '// ' + spec.description + '\\n' }}{%- endif %}
                {{- name }}{%- if name not in (tool.parameters.required or []) %}{{- '?' }}{%- endif %}{{- ': ' }}{{- type_of(spec, tool.parameters.required or []) }}{{- ',\\n' }}
            {%- endfor %}
            {{- '}) => any;\\n\\n' }}
        {%- else %}{{- '() => any;\\n\\n' }}
        {%- endif %}
    {%- endfor %}
    {{- '} // namespace ' + name }}
{%- endmacro -%}
{%- set effort = reasoning_effort if reasoning_effort is defined else 'medium' %}
{{- '<|start|>system<|message|>Knowledge cutoff: 2024-06\\nCurrent date: ' + strftime_now('%Y-%m-%d') + '\\n\\nReasoning: ' + effort + '\\n\\n# Valid channels: analysis, commentary, final.' }}{{- '<|end|>' }}
{%- if messages and messages[0].role in ['developer', 'system'] %}{%- set developer = messages[0].content %}{%- set rest = messages[1:] %}{%- else %}{%- set developer = '' %}{%- set rest = messages %}{%- endif %}
{%- if developer or tools %}{{- '<|start|>developer<|message|>' }}{%- if developer %}{{- '# Instructions\\n\\n' + developer + '\\n\\n' }}{%- endif %}{%- if tools -%}{{- '# Tools\\n\\n' }}{{- namespace_of('functions', tools) }}{%- endif -%}{{- '<|end|>' }}{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in rest -%}
    {%- if message.role == 'assistant' -%}
        {%- if 'tool_calls' in message %}
            {%- set call = message.tool_calls[0].function or message.tool_calls[0] %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary ' }}{{- (call.content_type if call.content_type is defined else 'json') + '<|message|>' }}{{- call.arguments|tojson }}{{- '<|call|>' }}
            {%- set last.name = call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if message.reasoning_content %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.reasoning_content + '<|end|>' }}{%- endif %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
        {%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{%- set last.name = none %}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last.name is none %}{{- raise_exception('a result without a call') }}{%- endif %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' + message.content|tojson + '<|end|>' }}
    {%- elif message.role == 'user' -%}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}
"""

QWEN_CODER = """{% macro render_extra(dict_in, handled) %}
    {%- if dict_in is mapping %}
        {%- for key in dict_in if key not in handled %}
            {%- if dict_in[key] is mapping or (dict_in[key] is sequence and dict_in[key] is not string) %}
                {{- '\\n<' ~ key ~ '>' ~ (dict_in[key] | tojson | safe) ~ '</' ~ key ~ '>' }}
            {%- else %}
                {{- '\\n<' ~ key ~ '>' ~ (dict_in[key] | string) ~ '</' ~ key ~ '>' }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{% endmacro %}
{%- if messages and messages[0]["role"] == "system" %}{%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- if system_message is defined %}{{- "<|im_start|>system\\n" + system_message }}{%- elif tools is iterable and tools | length > 0 %}{{- "<|im_start|>system\\nYou may call functions." }}{%- endif %}
{%- if tools is iterable and tools | length > 0 %}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
        {{- "\\n<function>\\n<name>" ~ tool.name ~ "</name>" }}
        {%- if tool.description is defined %}{{- '\\n<description>' ~ (tool.description | trim) ~ '</description>' }}{%- endif %}
        {{- '\\n<parameters>' }}
        {%- if tool.parameters is defined and tool.parameters is mapping and tool.parameters.properties is defined and tool.parameters.properties is mapping %}
            {%- for name, fields in tool.parameters.properties|items %}
                {{- '\\n<parameter>\\n<name>' ~ name ~ '</name>' }}
                {%- if fields.type is defined %}{{- '\\n<type>' ~ (fields.type | string) ~ '</type>' }}{%- endif %}
                {%- set handled = ['name', 'type', 'description'] %}
                {{- render_extra(fields, handled) }}
                {{- '\\n</parameter>' }}
            {%- endfor %}
        {%- endif %}
        {{- render_extra(tool.parameters, ['type', 'properties']) }}
        {{- '\\n</parameters>\\n</function>' }}
    {%- endfor %}
    {{- "\\n</tools>" }}
{%- endif %}
{%- if system_message is defined or (tools is iterable and tools | length > 0) %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in loop_messages %}
    {%- if message.role == "assistant" and message.tool_calls is defined and message.tool_calls is iterable and message.tool_calls | length > 0 %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content is defined and message.content is string and message.content | trim | length > 0 %}{{- '\\n' + message.content | trim + '\\n' }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
            {%- if tool_call.arguments is defined %}
                {%- for args_name, args_value in tool_call.arguments|items %}
                    {{- '<parameter=' + args_name + '>\\n' }}
                    {%- set args_value = args_value | tojson | safe if args_value is mapping or (args_value is sequence and args_value is not string) else args_value | string %}
                    {{- args_value }}{{- '\\n</parameter>\\n' }}
                {%- endfor %}
            {%- endif %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}{{- '<|im_start|>user\\n' }}{%- endif %}
        {{- '<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>\\n' }}
        {%- if not loop.last and loop.nextitem.role != "tool" %}{{- '<|im_end|>\\n' }}{%- elif loop.last %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

GLM = """[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools
<tools>
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
</tools>
{%- endif -%}
{%- macro visible_text(content) -%}
    {%- if content is string -%}{{- content }}
    {%- elif content is iterable and content is not mapping -%}{%- for item in content -%}{%- if item is mapping and item.type == 'text' -%}{{- item.text }}{%- elif item is string -%}{{- item }}{%- endif -%}{%- endfor -%}
    {%- else -%}{{- content }}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last_user_index=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {% set ns.last_user_index = loop.index0 -%}
    {%- endif %}
{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible_text(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking and not visible_text(m.content).endswith("/nothink")) else '' -}}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set reasoning_content = '' %}
{%- set content = visible_text(m.content) %}
{%- if m.reasoning_content is string %}{%- set reasoning_content = m.reasoning_content %}
{%- else %}{%- if '</think>' in content %}{%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- endif %}
{%- if loop.index0 > ns.last_user_index and reasoning_content -%}
{{ '\\n<think>' + reasoning_content.strip() +  '</think>'}}
{%- else -%}
{{ '\\n<think></think>' }}
{%- endif -%}
{%- if content.strip() -%}
{{ '\\n' + content.strip() }}
{%- endif -%}
{% if m.tool_calls %}
{% for tc in m.tool_calls %}
{%- if tc.function %}
    {%- set tc = tc.function %}
{%- endif %}
{{ '\\n<tool_call>' + tc.name }}
{% set _args = tc.arguments %}
{% for k, v in _args.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}
</tool_call>{% endfor %}
{% endif %}
{%- elif m.role == 'tool' -%}
{%- if m.content is string -%}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
    {{- '<|observation|>' }}
{%- endif %}
{{- '\\n<tool_response>\\n' }}
{{- m.content }}
{{- '\\n</tool_response>' }}
{%- else -%}
<|observation|>{% for tr in m.content %}

<tool_response>
{{ tr.output if tr.output is defined else tr }}
</tool_response>{% endfor -%}
{% endif -%}
{%- elif m.role == 'system' -%}
<|system|>
{{ visible_text(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|assistant|>{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- endif -%}
"""

COMMAND_R = """{{ bos_token }}{% if messages and messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% elif false == true %}{% set loop_messages = messages %}{% set system_message = 'You are Command.' %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% if system_message != false %}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system_message + '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% set content = message['content'] %}{% if message['role'] == 'user' %}{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% elif message['role'] == 'assistant' %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>'  + content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""

COMMAND_TOOLS = """{{ bos_token }}{%- macro json_to_python_type(json_spec) %}
{%- set basic_type_map = {"string": "str", "number": "float", "integer": "int", "boolean": "bool"} %}
{%- if basic_type_map[json_spec.type] is defined %}
    {{- basic_type_map[json_spec.type] }}
{%- elif json_spec.type == "array" %}
    {{- "List[" + json_to_python_type(json_spec['items']) + "]" }}
{%- elif json_spec.type == "object" %}
    {{- "Dict" }}
{%- elif json_spec.type is iterable %}
    {{- "Union[" }}{%- for t in json_spec.type %}{{- json_to_python_type({"type": t}) }}{%- if not loop.last %}{{- "," }}{%- endif %}{%- endfor %}{{- "]" }}
{%- else %}
    {{- "Any" }}
{%- endif %}
{%- endmacro %}
{%- if not tools %}{%- set tools = [] %}{%- endif %}
{%- for tool in tools %}
{%- set tool = tool.function or tool %}
{{- '```python\\ndef ' + tool.name + '(' }}{%- for name, field in (tool.parameters.properties|default({})).items() %}{%- if loop.index != 1 %}{{ ', ' }}{%- endif %}{{ name + ': ' }}{%- if name not in tool.parameters.required %}{{ 'Optional[' + json_to_python_type(field) + '] = None' }}{%- else %}{{ json_to_python_type(field) }}{%- endif %}{%- endfor %}{{- ') -> List[Dict]:\\n    \"\"\"' + tool.description|indent(4) + '\"\"\"\\n    pass\\n```' }}
{%- endfor %}
{%- for message in messages %}
{%- if message.role|lower == 'tool' %}{{- '<results>' ~ loop.index0 ~ '\\n' ~ message.content|string|replace('\\n', ' ') ~ '</results>' }}
{%- elif message.role|lower == 'assistant' %}{{- 'Action: ```json\\n' }}{{- message.tool_calls|map(attribute='function')|list|tojson(indent=4) if message.tool_calls else message.content }}{{- '\\n```' }}
{%- else %}{{- message.role|upper + ': ' + message.content|trim }}{%- endif %}
{%- endfor %}"""

GRANITE = """{%- if messages and messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = "Knowledge Cutoff Date: April 2024.\\nToday's Date: " + strftime_now('%B %d, %Y') + ".\\nYou are Granite." %}
    {%- if tools and documents %}
        {%- set system_message = system_message + " You have tools and documents." %}
    {%- elif tools %}
        {%- set system_message = system_message + " You have tools." %}
    {%- elif thinking %}
        {%- set system_message = system_message + " Think." %}
    {%- endif %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\\n' }}
{%- if tools %}
    {{- '<|start_of_role|>tools<|end_of_role|>' }}
    {{- tools | tojson(indent=4) }}
    {{- '<|end_of_text|>\\n' }}
{%- endif %}
{%- if documents %}
    {%- for document in documents %}
        {{- '<|start_of_role|>document {"document_id": "' + document['doc_id'] | string + '"}<|end_of_role|>\\n' + document['text'] + '<|end_of_text|>\\n' }}
    {%- endfor %}
{%- endif %}
{%- for message in loop_messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' }}
            {%- if controls %}
                {{- ' ' + controls | tojson() }}
            {%- endif %}
        {{- '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}
"""

KIMI = """{%- macro render_content(msg) -%}
    {%- set c = msg.get('content') -%}
    {%- if c is string -%}
      {{ c }}
    {%- elif c is not none -%}
      {% for content in c -%}
        {% if content['type'] == 'image' or 'image' in content or 'image_url' in content -%}
          <|media_start|>image<|media_content|><|media_pad|><|media_end|>
        {% else -%}
          {{ content['text'] }}
        {%- endif -%}
      {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if tools -%}
  <|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
  {%- if loop.first and messages[0]['role'] != 'system' -%}
  <|im_system|>system<|im_middle|>You are Kimi.<|im_end|>
  {%- endif -%}
  {%- set role_name = message.get('name') or message['role'] -%}
  {%- if message['role'] == 'user' -%}
    <|im_user|>{{role_name}}<|im_middle|>
  {%- elif message['role'] == 'assistant' -%}
    <|im_assistant|>{{role_name}}<|im_middle|>
  {%- else -%}
    <|im_system|>{{role_name}}<|im_middle|>
  {%- endif -%}
  {%- if message['role'] == 'assistant' and message.get('tool_calls') -%}
    {{render_content(message)}}<|tool_calls_section_begin|>
    {%- for tool_call in message['tool_calls'] -%}
      {%- set formatted_id = tool_call['id'] -%}
      <|tool_call_begin|>{{ formatted_id }}<|tool_call_argument_begin|>{% if tool_call['function']['arguments'] is string %}{{ tool_call['function']['arguments'] }}{% else %}{{ tool_call['function']['arguments'] | tojson }}{% endif %}<|tool_call_end|>
    {%- endfor -%}
    <|tool_calls_section_end|>
  {%- elif message['role'] == 'tool' -%}
    {%- set tool_call_id = message.tool_call_id -%}
    ## Return of {{ tool_call_id }}
{{render_content(message)}}
  {%- elif message['content'] is not none -%}
    {{render_content(message)}}
  {%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
  <|im_assistant|>assistant<|im_middle|>
{%- endif -%}
"""

LLAMA2 = "{% if messages and messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"

SMOL3 = """{%- set system_message = '' -%}
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set reasoning_mode = '/think' if enable_thinking else '/no_think' -%}
{%- if messages and messages[0].role == "system" -%}
  {%- set system_message = messages[0].content -%}
  {%- if "/no_think" in system_message -%}{%- set reasoning_mode = "/no_think" -%}{%- elif "/think" in system_message -%}{%- set reasoning_mode = "/think" -%}{%- endif -%}
  {%- set custom_instructions = system_message.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{{- "<|im_start|>system\\n" -}}
{%- set today = strftime_now("%d %B %Y") -%}
{{- "## Metadata\\n\\nToday Date: " ~ today ~ "\\nReasoning Mode: " + reasoning_mode + "\\n\\n" -}}
{%- if custom_instructions -%}{{- "## Custom Instructions\\n\\n" + custom_instructions + "\\n\\n" -}}{%- endif -%}
{%- if xml_tools or python_tools or tools -%}
  {{- "### Tools\\n\\n" -}}
  {%- set ns = namespace(xml_tool_string="<tools>\\n") -%}
  {%- for tool in (xml_tools or tools)[:] -%}{%- set ns.xml_tool_string = ns.xml_tool_string ~ (tool | string) ~ "\\n" -%}{%- endfor -%}
  {%- set ns.xml_tool_string = ns.xml_tool_string + "</tools>" -%}
  {{- ns.xml_tool_string + "\\n\\n" -}}
{%- endif -%}
{{- "<|im_end|>\\n" -}}
{%- for message in messages -%}
  {%- set content = message.content if message.content is string else "" -%}
  {%- if message.role == "user" -%}{{ "<|im_start|>" + message.role + "\\n"  + content + "<|im_end|>\\n" }}
  {%- elif message.role == "assistant" -%}
    {% generation %}{%- if reasoning_mode == "/think" -%}{{ "<|im_start|>assistant\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}{%- else -%}{{ "<|im_start|>assistant\\n" + "<think>\\n\\n</think>\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}{%- endif -%}{% endgeneration %}
  {%- elif message.role == "tool" -%}{{ "<|im_start|>" + "user\\n"  + content + "<|im_end|>\\n" }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{%- if reasoning_mode == "/think" -%}{{ "<|im_start|>assistant\\n" }}{%- else -%}{{ "<|im_start|>assistant\\n" + "<think>\\n\\n</think>\\n" }}{%- endif -%}{%- endif -%}
"""

MINIMAX = """{%- macro calls(list) -%}
<invocations>
{% for call in list -%}
<invoke name="{{ call.function.name }}">
{% for k, v in call.function.arguments.items() -%}
<parameter name="{{ k }}">{{ v | tojson(ensure_ascii=False) if v is not string else v }}</parameter>
{% endfor -%}
</invoke>
{% endfor -%}
</invocations>
{%- endmacro -%}
{%- set first = messages[0] if messages and messages[0].role == 'system' -%}
{{- ']~!b[]~b]system' ~ '\\n' ~ (first.content if first else 'You are helpful.') }}
{%- if tools %}{{ '\\n<tools>' }}{% for tool in tools %}{{ '\\n<tool>' ~ tool.function|tojson ~ '</tool>' }}{% endfor %}{{ '\\n</tools>' }}{% endif -%}
{{- '[e~[\\n' }}
{%- set last_user = namespace(at=-1) -%}
{%- for m in messages if m.role == 'user' %}{% set last_user.at = loop.index0 %}{% endfor -%}
{%- for m in (messages[1:] if first else messages) -%}
{%- if m.role == 'assistant' -%}{{- ']~b]ai\\n' -}}{%- if m.reasoning_content and loop.index0 > last_user.at -%}{{- '<think>\\n' ~ m.reasoning_content ~ '\\n</think>\\n\\n' -}}{%- endif -%}{{- m.content -}}{%- if m.tool_calls -%}{{- '\\n' ~ calls(m.tool_calls) -}}{%- endif -%}{{- '[e~[\\n' -}}
{%- elif m.role == 'tool' -%}{{- (']~b]tool' if loop.first or loop.previtem.role != 'tool') ~ '\\n<response>' ~ m.content ~ '</response>' ~ ('[e~[\\n' if loop.last or loop.nextitem.role != 'tool') -}}
{%- elif m.role == 'user' -%}{{- ']~b]user\\n' ~ m.content ~ '[e~[\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- ']~b]ai\\n<think>\\n' -}}{%- endif -%}
"""

PHI4MINI = "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
PHI4 = "{% for message in messages %}{% if (message['role'] == 'system') %}{{'<|im_start|>system<|im_sep|>' + message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'user') %}{{'<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'assistant') %}{{'<|im_start|>assistant<|im_sep|>' + message['content'] + '<|im_end|>'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
HERMES = chatml("{%- if tools %}{{ '<|im_start|>system\\nTools: <tools>' }}{%- for tool in tools %}{{ '{\"type\": \"function\", \"function\": ' }}{{ '{\"name\": ' + tool.function.name + '\", \"parameters\": ' }}{{ tool.function.parameters.properties | tojson }}{{ '}' }}{%- if not loop.last %}{{ '\\n' }}{%- endif %}{%- endfor %}{{ '</tools><|im_end|>\\n' }}{%- endif %}\n")
FALCON = "{% for message in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}{{ (message['role']|capitalize) + ': ' + message['content']|trim }}{% endfor %}{% if add_generation_prompt %}{{ '\n' + 'Assistant:' }}{% endif %}"
VICUNA = "{% if messages and messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = 'A chat.' %}{% endif %}{% for message in loop_messages %}{% if loop.index0 == 0 %}{{ system_message }}{% endif %}{% if message['role'] == 'user' %}{{ ' USER: ' + message['content'].strip() }}{% elif message['role'] == 'assistant' %}{{ ' ASSISTANT: ' + message['content'].strip() + eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
ALPACA = "{% if messages and messages[0]['role'] == 'system' %}{{ messages[0]['content'].strip() + '\\n\\n' }}{% set messages = messages[1:] %}{% endif %}{% for message in messages %}{% if message.role == 'user' %}### Instruction:\n{{ message['content'].strip() }}\n\n{% elif message.role == 'assistant' %}### Response:\n{{ message['content'].strip() }}\n\n{% if not loop.last %}{{ eos_token }}{% endif %}{% endif %}{% endfor %}{% if add_generation_prompt %}### Response:\n{% endif %}"
OPENCHAT = "{{ bos_token }}{% for message in messages %}{{ 'GPT4 Correct ' + message['role'].title() + ': ' + message['content'] + '<|end_of_turn|>'}}{% endfor %}{% if add_generation_prompt %}{{ 'GPT4 Correct Assistant:' }}{% endif %}"
EXAONE = "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}{{ '[|system|][|endofturn|]\\n' }}{% endif %}{% set content = message['content'] %}{% if message['role'] == 'assistant' and '</thought>' in content %}{% set content = content.split('</thought>')[-1].lstrip('\\n') %}{% endif %}{{ '[|' + message['role'] + '|]' + content }}{% if not message['role'] == 'user' %}{{ '[|endofturn|]' }}{% endif %}{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '\\n[|assistant|]' }}{% endif %}"
NEMOTRON = "{{'<extra_id_0>System'}}{% for message in messages %}{% if message['role'] == 'system' %}{{'\\n' + message['content'].strip()}}{% if tools %}{{'\\n'}}{% endif %}{% endif %}{% endfor %}{% if tools %}{% for tool in tools %}{{ '\\n<tool> ' + tool|tojson + ' </tool>' }}{% endfor %}{% endif %}{{'\\n\\n'}}{% for message in messages %}{% if message['role'] == 'user' %}{{ '<extra_id_1>User\\n' + message['content'].strip() + '\\n' }}{% elif message['role'] == 'assistant' %}{{ '<extra_id_1>Assistant\\n' + message['content'].strip() + '\\n' }}{% elif message['role'] == 'tool' %}{{ '<extra_id_1>Tool\\n' + message['content'].strip() + '\\n' }}{% endif %}{% endfor %}{%- if add_generation_prompt %}{{'<extra_id_1>Assistant\\n'}}{%- endif %}"
OLMO = "{{ bos_token }}{%- set has_system = messages|selectattr('role', 'equalto', 'system')|list|length > 0 -%}{%- if not has_system -%}{{ '<|im_start|>system\nYou are OLMo.' }}{%- if tools is none -%}{{ ' No functions.' }}{%- else -%}{{ ' <functions>' }}{{ tools | map(attribute='function') | list | tojson }}{{ '</functions>' }}{%- endif -%}{{ '<|im_end|>\n' }}{%- endif -%}{%- for message in messages -%}{%- if message['role'] == 'assistant' -%}{{ '<|im_start|>assistant\n' }}{%- if message.get('content', none) is not none -%}{{ message['content'] }}{%- endif -%}{%- if message.get('function_calls', none) is not none -%}{{ '<function_calls>' + message['function_calls'] + '</function_calls>' }}{%- elif message.get('tool_calls') -%}{{ '<function_calls>' }}{%- for call in message['tool_calls'] -%}{%- set args = call.function.arguments -%}{{ call.function.name + '(' }}{%- for name, value in args.items() -%}{{ name + '=' + value|tojson }}{{ ', ' if not loop.last }}{%- endfor -%}{{ ')\n' if not loop.last else ')' }}{%- endfor -%}{{ '</function_calls>' }}{%- endif -%}{%- if not loop.last -%}{{ '<|im_end|>' + '\n' }}{%- else -%}{{ eos_token }}{%- endif -%}{%- else -%}{{ '<|im_start|>' + ('environment' if message.role == 'tool' else message.role) + '\n' + message['content'] + '<|im_end|>\n' }}{%- endif -%}{%- if loop.last and add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}{%- endfor -%}"
INTERNLM = "{{ bos_token }}{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
STABLELM = "{% for message in messages %}{{'<|' + message['role'] + '|>\n' + message['content'] | trim + '<|endoftext|>\n'}}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
DBRX = "{% if messages and messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% elif 'system' not in messages|map(attribute='role') %}{% set loop_messages = messages %}{% set system_message = 'You are DBRX.' %}{% endif %}{% for message in loop_messages %}{% if loop.index0 == 0 %}{{ '<|im_start|>system\n' + system_message + '<|im_end|>\n' }}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}{% else %}{{ '\n' + '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}{% endif %}{% if (add_generation_prompt == true and loop.last) %}{{ '\n' + '<|im_start|>' + 'assistant' + '\n' }}{% endif %}{% endfor %}"
LFM = "{{- bos_token -}}{%- set system_prompt = '' -%}{%- set ns = namespace(system_prompt='') -%}{%- if messages and messages[0]['role'] == 'system' -%}{%- set ns.system_prompt = messages[0]['content'] -%}{%- set messages = messages[1:] -%}{%- endif -%}{%- if tools -%}{%- set ns.system_prompt = ns.system_prompt + ('\n' if ns.system_prompt else '') + 'List of tools: <|tool_list_start|>[' -%}{%- for tool in tools -%}{%- if tool is not string -%}{%- set tool = tool | tojson -%}{%- endif -%}{%- set ns.system_prompt = ns.system_prompt + tool -%}{%- if not loop.last -%}{%- set ns.system_prompt = ns.system_prompt + ', ' -%}{%- endif -%}{%- endfor -%}{%- set ns.system_prompt = ns.system_prompt + ']<|tool_list_end|>' -%}{%- endif -%}{%- if ns.system_prompt -%}{{- '<|im_start|>system\n' + ns.system_prompt + '<|im_end|>\n' -}}{%- endif -%}{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\n' -}}{%- set content = message['content'] -%}{%- if content is not string -%}{%- set content = content | tojson -%}{%- endif -%}{%- if message['role'] == 'tool' -%}{%- set content = '<|tool_response_start|>' + content + '<|tool_response_end|>' -%}{%- endif -%}{{- content + '<|im_end|>\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
ERNIE = "{%- if not add_generation_prompt is defined -%}{%- set add_generation_prompt = true -%}{%- endif -%}{%- if not cls_token is defined -%}{%- set cls_token = '<|begin_of_sentence|>' -%}{%- endif -%}{{- cls_token -}}{%- for message in messages -%}{%- if message['role'] == 'user' -%}{{- 'User: ' + message['content'] + '\n' -}}{%- elif message['role'] == 'assistant' -%}{{- 'Assistant: ' + message['content'] + '<|end_of_sentence|>' -}}{%- elif message['role'] == 'system' -%}{{- message['content'] + '\n' -}}{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{- 'Assistant: ' -}}{%- endif -%}"
HUNYUAN = "{% set context = {'has_head': true} %}{% for message in messages %}{% if loop.index0 == 0 %}{% if message['role'] == 'system' %}{% set content = '<|startoftext|>' + message['content'] + '<|extra_4|>' %}{% else %}{% set content = '<|startoftext|>' + message['content'] + '<|extra_0|>' %}{% endif %}{% else %}{% if message['role'] == 'user' %}{% set content = ('<|startoftext|>' if not context.has_head else '') + message['content'] + '<|extra_0|>' %}{% else %}{% set content = message['content'] + '<|eos|>' %}{% endif %}{% endif %}{{ content }}{% endfor %}"
SEED = "{%- set bos = '<seed:bos>' %}{%- set budget = thinking_budget if thinking_budget is defined else -1 %}{%- set table = [[0, 0], [512, 128], [1024, 256]] %}{%- set ns = namespace(interval=none) %}{%- for t, i in table %}{%- if ns.interval is none and budget <= t %}{%- set ns.interval = i %}{%- endif %}{%- endfor %}{%- macro py_type(t) -%}{%- if t == 'string' -%}str{%- elif t in ('number', 'integer') -%}int{%- elif t == 'array' -%}list{%- else -%}Any{%- endif -%}{%- endmacro -%}{%- for item in tools or [] %}{{ 'def ' ~ item.function.name ~ '(' }}{%- for name, p in item.function.parameters.properties.items() %}{{ name ~ ': ' ~ py_type(p.type) ~ (', ' if not loop.last else '') }}{%- endfor %}{{ '):\\n' }}{%- endfor %}{%- for message in messages %}{{ bos + message.role + '\\n' + (message.content or '') }}{{ ns.interval }}<seed:eos>{%- endfor %}{%- if add_generation_prompt %}{{ bos ~ 'assistant\\n' }}{%- if budget == 0 %}{{ '<seed:think></seed:think>' }}{%- endif %}{%- endif %}"
JAMBA = "{% set ns = namespace(message_count=0, is_last_checked_defined=False) %}{{ bos_token }}{% if messages and messages[0]['role'] == 'system' %}{% set ns.system = messages[0]['content'] %}{% endif %}{% if tools is defined and tools %}{{ '<|system|>' ~ (ns.system or '') ~ '\n# Tools\n' }}{% for tool in tools %}{{ '- ' ~ tool.function.name ~ ': ' ~ tool.function.parameters|tojson ~ '\n' }}{% endfor %}{% endif %}{%- for message in messages %}{%- set ns.message_count = ns.message_count + 1 %}{%- if message['role'] == 'user' %}{{ '<|bom|><|user|> ' + message['content']|trim + '<|eom|>' }}{%- elif message['role'] == 'assistant' %}{{ '<|bom|><|assistant|>' }}{%- if message['tool_calls'] %}{{ ' ' ~ message['tool_calls']|map(attribute='function')|list|tojson }}{%- else %}{{ ' ' ~ message['content'] }}{%- endif %}{{ '<|eom|>' }}{%- endif %}{%- if loop.last and add_generation_prompt %}{{ '<|bom|><|assistant|>' }}{%- endif %}{%- endfor %}{{ ns.message_count if ns.nothing is defined }}"
LLAMA4 = "{{- bos_token }}\n{%- if messages and messages[0]['role'] == 'system' %}{%- if messages[0]['content'] is string %}{%- set system_message = messages[0]['content']|trim %}{%- else %}{%- set system_message = messages[0]['content'][0]['text']|trim %}{%- endif %}{%- set messages = messages[1:] %}{%- set user_supplied = true %}{%- else %}{%- if tools is not none %}{%- set system_message = 'You may call.' %}{%- endif %}{%- endif %}\n{%- if system_message %}{{- '<|header_start|>system<|header_end|>\\n\\n' }}{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}{%- endif %}{{- system_message }}{{- '<|eot|>' }}{%- endif %}\n{%- for message in messages %}{%- if not (message.role == 'ipython' or message.role == 'tool' or ('tool_calls' in message and message.tool_calls|length != 0)) %}{{- '<|header_start|>' + message['role'] + '<|header_end|>\\n\\n' }}{%- if message['content'] is string %}{{- message['content'] }}{%- else %}{%- for content in message['content'] %}{%- if content['type'] == 'text' %}{{- content['text'] | trim }}{%- endif %}{%- endfor %}{%- endif %}{{- '<|eot|>' }}{%- elif 'tool_calls' in message and message.tool_calls|length > 0 %}{{- '<|header_start|>assistant<|header_end|>\\n\\n' -}}{{- '<|python_start|>' }}{%- for tool_call in message.tool_calls %}{{- '{\"name\": \"' + tool_call.function.name + '\", \"parameters\": ' }}{{- tool_call.function.arguments | tojson }}{{- '}' }}{%- endfor %}{{- '<|python_end|><|eom|>' }}{%- elif message.role == 'tool' %}{{- '<|header_start|>ipython<|header_end|>\\n\\n' }}{{- message.content|tojson }}{{- '<|eot|>' }}{%- endif %}{%- endfor %}\n{%- if add_generation_prompt %}{{- '<|header_start|>assistant<|header_end|>\\n\\n' }}{%- endif %}\n"


def named():
    roles = lambda u, a, s: [("user", u), ("system", s), ("assistant", a)]
    return [
        ("chatml", chatml()), ("qwen1.5", chatml(default="You are a helpful assistant")), ("qwen2.5", qwen()), ("qwen3", qwen("hybrid", None)), ("qwq", qwen("always", "")), ("qwen3-coder", QWEN_CODER),
        ("llama2", LLAMA2), ("llama3", llama3()), ("llama3.1", llama3(True, False)), ("llama3.2", llama3(True, True)), ("llama3.3", llama3(True, True, "|trim")), ("llama4", LLAMA4),
        ("mistral-v1", mistral(system="first")), ("mistral-v2", mistral(system="last")), ("mistral-v3", mistral(True, "last")), ("mistral-nemo", mistral(True, "last", "")), ("mixtral", mistral(False, "first", " ")),
        ("gemma", gemma("refuse")), ("gemma2", gemma("refuse")), ("gemma3", gemma()), ("phi3", zephyr(roles("<|user|>", "<|assistant|>", "<|system|>"), "\n", "<|end|>")), ("phi4", PHI4), ("phi4-mini", PHI4MINI),
        ("deepseek-v2.5", deepseek()), ("deepseek-v3", deepseek(True)), ("deepseek-r1", deepseek(True, True)), ("command-r", COMMAND_R), ("command-r-tools", COMMAND_TOOLS), ("granite3", GRANITE), ("hermes3", HERMES),
        ("zephyr", zephyr(roles("<|user|>", "<|assistant|>", "<|system|>"))), ("tinyllama", zephyr(roles("<|user|>", "<|assistant|>", "<|system|>"), "\n", "{{ eos_token }}")), ("vicuna", VICUNA), ("alpaca", ALPACA), ("openchat", OPENCHAT),
        ("smollm2", chatml(default="You are SmolLM")), ("smollm3", SMOL3), ("falcon3", FALCON), ("olmo3", OLMO), ("internlm2.5", INTERNLM), ("stablelm2", STABLELM), ("yi1.5", chatml("{% if messages and messages[0]['role'] == 'system' %}{% set system_message = messages[0]['content'] %}{% endif %}{% if system_message is defined %}{{ system_message }}{% endif %}")),
        ("glm4.5", GLM), ("kimi-k2", KIMI), ("minimax-m2", MINIMAX), ("gpt-oss", HARMONY), ("exaone3.5", EXAONE), ("nemotron", NEMOTRON), ("dbrx", DBRX), ("jamba", JAMBA), ("lfm2", LFM), ("ernie4.5", ERNIE), ("hunyuan", HUNYUAN), ("seed-oss", SEED),
    ]
