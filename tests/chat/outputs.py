"""Outputs in all formats, written by hand from what the models' documentation and chat templates say, and what is in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aengine.chat import ChatFormat

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "code": {"type": "string"},
                    "more": {"type": "object"},
                },
            },
        },
    }
    for name in ("weather", "run", "now")
]
HERMES = ChatFormat("hermes", "think")
Calls = list[tuple[str, dict[str, Any]]]
BATH: Calls = [("weather", {"city": "Bath", "days": 2})]
TWO: Calls = [*BATH, ("weather", {"city": "Köln", "days": -1})]
ODD: dict[str, Any] = {"code": 'a "b" </x> \\ \n\t{[<é😀', "more": {"a": [1, 2.5e3, None, True, {}], "": []}}


@dataclass(frozen=True)
class Output:
    name: str
    text: str
    calls: Calls
    content: str = ""
    reasoning: str = ""
    format: ChatFormat = HERMES
    opened: bool = False


HERMES_BATH = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bath", "days": 2}}\n</tool_call>'
HERMES_KOELN = '<tool_call>\n{"name": "weather", "arguments": {"city": "K\\u00f6ln", "days": -1}}\n</tool_call>'
V3_BATH = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Bath", "days": 2}\n```<｜tool▁call▁end｜>'
V3_KOELN = V3_BATH.replace("Bath", "Köln").replace("2}", "-1}")
GEMMA_BATH = "<start_function_call>call:weather{city:<escape>Bath<escape>,days:2}<end_function_call>"
MISTRAL, LLAMA, HARMONY = ChatFormat("mistral", "mistral"), ChatFormat("llama"), ChatFormat("harmony")
DEEPSEEK, GEMMA3, FUNCTION_GEMMA = ChatFormat("deepseek", "think"), ChatFormat("gemma3"), ChatFormat("function_gemma")
KIMI = ChatFormat("kimi", "think")
KIMI_BATH = '<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Bath", "days": 2}<|tool_call_end|>'
GEMMA4, JSON = ChatFormat("gemma4", "gemma4"), ChatFormat("json", "think")

OUTPUTS = [
    Output("hermes", HERMES_BATH, BATH),
    Output("hermes_two", f"I look.\n{HERMES_BATH}\n{HERMES_KOELN}", TWO, "I look."),
    Output("hermes_thought", f"<think>\nWhere is Bath?\n</think>\n\nI look.\n{HERMES_BATH}", BATH, "I look.", "Where is Bath?"),
    Output("hermes_opened", f"Where is\n\nBath?\n</think>\n\n{HERMES_BATH}\n", BATH, "", "Where is\n\nBath?", opened=True),
    Output("hermes_no_thought", "<think>\n\n</think>\n\nRain.", [], "Rain."),
    Output("hermes_cut", "<think>\nWhere", [], "", "Where"),
    Output(
        "hermes_odd",
        '<tool_call>{"name":"run","arguments":{"code":"a \\"b\\" </x> \\\\ \\n\\t{[<é😀",'
        '"more":{"a":[1,2.5e3,null,true,{}],"":[]}}}</tool_call>',
        [("run", ODD)],
    ),
    Output("hermes_order", '<tool_call>{"id": "x", "arguments": {"days": 1}, "name": "weather"}</tool_call>', [("weather", {"days": 1})]),
    Output("hermes_written", '<tool_call>{"name": "run", "arguments": "{\\"code\\": \\"1\\"}"}</tool_call>', [("run", {"code": "1"})]),
    Output("hermes_none", '<tool_call>{"name": "now"}</tool_call> ok', [("now", {})], "ok"),
    Output("hermes_raw_line", '<tool_call>{"name": "run", "arguments": {"code": "a\nb"}}</tool_call>', [("run", {"code": "a\nb"})]),
    Output(
        "coder",
        "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nBath\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
        BATH,
        "I look.",
    ),
    Output(
        "coder_odd",
        "<tool_call>\n<function=run>\n<parameter=code>\n1\n\n</x>\n</parameter>\n<parameter=more>\n{}\n</parameter>\n</function>\n</tool_call>\n"
        "<function=now>\n</function>",
        [("run", {"code": "1\n\n</x>", "more": {}}), ("now", {})],
    ),
    Output("coder_json", '<function=weather>{"city": "Bath", "days": 2}</function>', BATH),
    Output(
        "glm",
        "\nI look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bath</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
        [*BATH, ("now", {})],
        "\nI look.",
    ),
    Output(
        "glm_odd",
        "<tool_call>run<arg_key>code</arg_key><arg_value>\n1 </x>\n</arg_value><arg_key>more</arg_key><arg_value>{}</arg_value>"
        "</tool_call>",
        [("run", {"code": "\n1 </x>\n", "more": {}})],
    ),
    Output("glm_text", "<tool_call>what</tool_call>", [], "<tool_call>what</tool_call>"),
    Output("llama", '{"name": "weather", "parameters": {"city": "Bath", "days": 2}}', BATH, format=LLAMA),
    Output("llama_type", '\n{"type": "function", "name": "weather", "parameters": {"city": "Bath", "days": 2}}\n', BATH, format=LLAMA),
    Output("llama_tag", '<|python_tag|>{"name": "weather", "parameters": {"city": "Bath", "days": 2}}', BATH, format=LLAMA),
    Output(
        "llama_two",
        '{"name": "weather", "parameters": {"city": "Bath", "days": 2}}; {"name": "weather", "parameters": {"city": "Köln", "days": -1}}',
        TWO,
        format=LLAMA,
    ),
    Output("llama_answer", '{"name": "Ann", "parameters": {"age": 3}}', [], '{"name": "Ann", "parameters": {"age": 3}}', format=LLAMA),
    Output("llama_python", '[weather(city="Bath", days=2), now()]', [*BATH, ("now", {})], format=LLAMA),
    Output("llama_start", '<|python_start|>[weather(city="Bath", days=2)]<|python_end|>', BATH, format=LLAMA),
    Output("llama_other_python", "[f(x=1)]", [], "[f(x=1)]", format=LLAMA),
    Output("llama_list", "[see below] weather", [], "[see below] weather", format=LLAMA),
    Output("llama_code", "<|python_tag|>print(1)", [], "<|python_tag|>print(1)", format=LLAMA),
    Output("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bath", "days": 2}}]', BATH, format=MISTRAL),
    Output(
        "mistral_two",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bath", "days": 2}}, '
        '{"name": "weather", "arguments": {"city": "Köln", "days": -1}, "id": "abcdefghi"}]',
        TWO,
        format=MISTRAL,
    ),
    Output(
        "mistral_args",
        '[THINK]Bath?[/THINK]I look.[TOOL_CALLS]weather[ARGS]{"city": "Bath", "days": 2}[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]'
        '{"city": "Köln", "days": -1}',
        TWO,
        "I look.",
        "Bath?",
        format=MISTRAL,
    ),
    Output(
        "harmony",
        "<|channel|>analysis<|message|>Where is Bath?<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json"
        '<|message|>{"city": "Bath", "days": 2}<|call|>',
        BATH,
        reasoning="Where is Bath?",
        format=HARMONY,
    ),
    Output(
        "harmony_recipient_first",
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Bath", "days": 2}',
        BATH,
        format=HARMONY,
    ),
    Output(
        "harmony_final",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look. <|end|>"
        "<|start|>assistant<|channel|>final<|message|>Rain.\n\n< Sun<|return|>",
        [],
        "I look.Rain.\n\n< Sun",
        "Hm.",
        format=HARMONY,
    ),
    Output("harmony_bare", "analysis Hm. assistantfinal Rain.", [], "analysis Hm. assistantfinal Rain.", format=HARMONY),
    Output(
        "deepseek_v3",
        f"Bath?\n</think>\n\nI look.<｜tool▁calls▁begin｜>{V3_BATH}\n{V3_KOELN}<｜tool▁calls▁end｜>",
        TWO,
        "I look.",
        "Bath?",
        format=DEEPSEEK,
        opened=True,
    ),
    Output(
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        '{"city": "Bath", "days": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        BATH,
        format=DEEPSEEK,
    ),
    Output(
        "deepseek_v32",
        'I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Bath'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="run">\n<｜DSML｜parameter name="code" string="true">\n1 < "2"</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        [*BATH, ("run", {"code": '\n1 < "2"'})],
        "I look.",
        format=DEEPSEEK,
    ),
    Output(
        "deepseek_v4",
        '<｜DSML｜tool_calls><｜DSML｜invoke name="now"></｜DSML｜invoke></｜DSML｜tool_calls>',
        [("now", {})],
        format=DEEPSEEK,
    ),
    Output(
        "kimi",
        f"<think>Hm.</think>I look.<|tool_calls_section_begin|>{KIMI_BATH}"
        f"{KIMI_BATH.replace('Bath', 'Köln').replace('2}', '-1}').replace(':0', ':1 ')}<|tool_calls_section_end|>",
        TWO,
        "I look.",
        "Hm.",
        format=KIMI,
    ),
    Output(
        "gemma3",
        'I look.\n```tool_code\nweather(city="Bath", days=2)\nprint(weather(city="Köln", days=-1))\n```',
        TWO,
        "I look.",
        format=GEMMA3,
    ),
    Output("gemma3_list", '```tool_code\n[weather(city="Bath", days=2), now()]\n```', [*BATH, ("now", {})], format=GEMMA3),
    Output("gemma3_code", "```tool_code\nx = 1\n```", [], "```tool_code\nx = 1\n```", format=GEMMA3),
    Output("function_gemma", GEMMA_BATH, BATH, format=FUNCTION_GEMMA),
    Output("function_gemma_two", f"{GEMMA_BATH}{GEMMA_BATH.replace('Bath', 'Köln').replace('2', '-1')}", TWO, format=FUNCTION_GEMMA),
    Output(
        "gemma4",
        '<|channel>thought\nHm.\n<channel|><|tool_call>call:run{code:<|"|>a "b" </x> \\ \n\t{[<é😀<|"|>,'
        'more:{a:[1,2.5e3,null,true,{}],<|"|><|"|>:[]}}'
        "<tool_call|>",
        [("run", ODD)],
        reasoning="Hm.",
        format=GEMMA4,
    ),
    Output("json", '<think>Hm.</think>{"name": "weather", "arguments": {"city": "Bath", "days": 2}}', BATH, "", "Hm.", format=JSON),
    Output(
        "json_list",
        '[{"name": "weather", "arguments": {"city": "Bath", "days": 2}}, {"name": "weather", "arguments": {"city": "Köln", "days": -1}}]\n',
        TWO,
        format=JSON,
    ),
    Output("json_answer", '{"city": "Bath"}', [], '{"city": "Bath"}', format=JSON),
    Output("text", " Rain < sun, and <tool <think\n", [], " Rain < sun, and <tool <think\n"),
]
