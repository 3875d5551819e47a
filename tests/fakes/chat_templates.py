"""Short chat templates that do what the families' published ones do with thinking and system turns.

Written for the tests; each keeps one family's behaviour and nothing else of its template.
"""

# One message in ChatML.
_CHATML = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"

QWEN3 = """
{%- if messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- set last = namespace(query=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.query = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}{% set said = m.content %}
{%- if not thought and '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1].strip() %}{% set said = said.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>assistant\\n' }}{% if loop.index0 > last.query %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}{{ said + '<|im_end|>\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}
"""

# Refuses a system turn that is not the first; opens the thinking itself.
QWEN3_5 = """
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
{%- if m.role in ('system', 'user') %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set said = m.content.split('</think>')[-1].lstrip('\\n') %}
{{- '<|im_start|>assistant\\n' }}{% if loop.last or preserve_thinking is defined and preserve_thinking %}{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}{{ said + '<|im_end|>\\n' }}
{%- else %}{{ raise_exception('Unexpected message role.') }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% else %}{{ '<think>\\n' }}{% endif %}{% endif %}
"""

# Gathers system turns at the top and drops developer turns; an absent switch means off.
DEEPSEEK_V3_1 = """
{%- if not thinking is defined %}{% set thinking = false %}{% endif %}
{%- set ns = namespace(system='') %}
{%- for m in messages %}{% if m.role == 'system' %}{% set ns.system = ns.system + ('\\n\\n' if ns.system else '') + m.content %}{% endif %}{% endfor %}
{{- bos_token + ns.system }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<\uff5cUser\uff5c>' + m.content }}
{%- elif m.role == 'assistant' %}{{ '<\uff5cAssistant\uff5c></think>' + (m.content.split('</think>', 1)[1] if '</think>' in m.content else m.content) + '<\uff5cend\u2581of\u2581sentence\uff5c>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<\uff5cAssistant\uff5c>' + ('<think>' if thinking else '</think>') }}{% endif %}
"""

DEEPSEEK_R1 = """
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ m.content }}
{%- elif m.role == 'user' %}{{ '<\uff5cUser\uff5c>' + m.content }}
{%- elif m.role == 'assistant' %}{{ '<\uff5cAssistant\uff5c>' + m.content.split('</think>')[-1] + '<\uff5cend\u2581of\u2581sentence\uff5c>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<\uff5cAssistant\uff5c><think>\\n' }}{% endif %}
"""

# Marks the user turn too when thinking is off.
GLM_4_5 = """[gMASK]<sop>
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|user|>\\n' + m.content + ('/nothink' if enable_thinking is defined and not enable_thinking else '') }}
{%- elif m.role == 'assistant' %}{{ '<|assistant|>\\n<think>' + (m.reasoning_content or '' if loop.last else '') + '</think>\\n' + m.content.split('</think>')[-1] }}
{%- elif m.role == 'system' %}{{ '<|system|>\\n' + m.content }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' + ('\\n<think></think>' if enable_thinking is defined and not enable_thinking else '') }}{% endif %}
"""

# Has a system turn of its own, an effort and no switch; refuses the tags in an answer.
GPT_OSS = """
{%- set effort = reasoning_effort if reasoning_effort is defined else 'medium' %}
{{- '<|start|>system<|message|>You are ChatGPT.\\nCurrent date: ' + strftime_now('%Y-%m-%d') + '\\n\\nReasoning: ' + effort + '\\n\\n# Valid channels: analysis, commentary, final.<|end|>' }}
{%- set rest = messages %}
{%- if messages[0].role in ('developer', 'system') %}{{ '<|start|>developer<|message|># Instructions\\n\\n' + messages[0].content + '<|end|>' }}{% set rest = messages[1:] %}{% endif %}
{%- for m in rest %}
{%- if m.role == 'assistant' %}
{%- if '<|channel|>analysis<|message|>' in m.content %}{{ raise_exception('You have passed a message containing <|channel|> tags in the content field.') }}{% endif %}
{%- if loop.last and not add_generation_prompt and m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}
"""

# Thinks always; the model writes the opening tag itself.
KIMI_K2_THINKING = """
{%- for m in messages %}
{{- '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' }}
{%- if m.role == 'assistant' %}{{ '<think>' + (m.reasoning_content or '' if loop.last else '') + '</think>' }}{% endif %}
{{- m.content + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}
"""

KIMI_K3 = """
{%- macro open(tag) %}{{ '<|open|>' + tag + '<|sep|>' }}{% endmacro %}
{%- macro close(tag) %}{{ '<|close|>' + tag + '<|sep|>' }}{% endmacro %}
{%- if thinking is undefined %}{% set thinking = true %}{% endif %}
{%- if thinking_effort is undefined %}{% set thinking_effort = 'max' %}{% endif %}
{%- if thinking and thinking_effort not in ['low', 'medium', 'high', 'max'] %}{{ raise_exception('Unsupported thinking_effort=' + thinking_effort|string) }}{% endif %}
{%- if thinking %}{{ open('message role="system"') + 'thinking_effort=' + thinking_effort + close('message') }}{% endif %}
{%- for m in messages if m.role in ('system', 'user', 'assistant') %}
{{- open('message role="' + m.role + '"') }}
{%- if m.role == 'assistant' %}{% if thinking %}{{ open('think') + (m.reasoning_content or '') + close('think') }}{% endif %}{{ open('response') + m.content + close('response') }}{% else %}{{ m.content }}{% endif %}
{{- close('message') }}{% endfor %}
{%- if add_generation_prompt %}{{ open('message role="assistant"') + open('think' if thinking else 'response') }}{% endif %}
"""

KIMI_VL = """
{%- for m in messages %}{{ '<|im_' + m.role + '|>' + m.content.split('\u25c1/think\u25b7')[-1] + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}<|im_assistant|>\u25c1think\u25b7{% endif %}
"""

MINIMAX_M2 = """
{{- ']~!b[' }}
{%- if messages[0].role != 'system' %}{{ ']~b]system\\nYou are a helpful assistant.[e~[\\n' }}{% endif %}
{%- for m in messages %}
{{- ']~b]' + ('ai' if m.role == 'assistant' else m.role) + '\\n' }}
{%- if m.role == 'assistant' and m.reasoning_content and loop.last %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content.split('</think>')[-1] + '[e~[\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ ']~b]ai\\n<think>\\n' }}{% endif %}
"""

MINIMAX_M3 = """
{%- set mode = thinking_mode if thinking_mode is defined else 'adaptive' %}
{%- for m in messages %}{{ ']~b]' + m.role + '\\n' + m.content + '[e~[\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ ']~b]ai\\n' }}{% if mode == 'enabled' %}<mm:think>{% elif mode == 'disabled' %}<mm:think></mm:think>{% endif %}{% endif %}
"""

GRANITE = """
{%- set system = messages[0].content if messages[0].role == 'system' else 'You are Granite, developed by IBM.' %}
{%- if thinking %}{% set system = system + '\\nWrite your thoughts between <think></think> first.' %}{% endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\\n' }}
{%- for m in (messages[1:] if messages[0].role == 'system' else messages) %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}
"""

GEMMA_4 = """
{%- set rest = messages %}{{ bos_token }}
{%- if (enable_thinking is defined and enable_thinking) or messages[0].role in ('system', 'developer') %}
{{- '<|turn>system\\n' }}{% if enable_thinking is defined and enable_thinking %}{{ '<|think|>\\n' }}{% endif %}
{%- if messages[0].role in ('system', 'developer') %}{{ messages[0].content | trim }}{% set rest = messages[1:] %}{% endif %}
{{- '<turn|>\\n' }}{% endif %}
{%- for m in rest %}{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
{%- if m.role == 'assistant' %}{% if loop.last and m.reasoning_content %}{{ '<|channel>thought\\n' + m.reasoning_content + '<channel|>' }}{% endif %}{{ m.content.split('<channel|>')[-1] | trim }}{% else %}{{ m.content | trim }}{% endif %}
{{- '<turn|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|turn>model\\n' }}{% if not enable_thinking | default(false) %}{{ '<|channel>thought\\n<channel|>' }}{% endif %}{% endif %}
"""

# Switched by a budget of no tokens.
SEED_OSS = """
{%- if thinking_budget is not defined %}{% set thinking_budget = -1 %}{% endif %}
{%- if thinking_budget == 0 %}<seed:bos>system\\nSkip the thinking.<seed:eos>{% elif thinking_budget > 0 %}<seed:bos>system\\nYour thinking budget is {{ thinking_budget }}.<seed:eos>{% endif %}
{%- for m in messages %}{{ '<seed:bos>' + m.role + '\\n' }}{% if m.reasoning_content %}{{ '<seed:think>' + m.reasoning_content + '</seed:think>' }}{% endif %}{{ m.content + '<seed:eos>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<seed:bos>assistant\\n' }}{% if thinking_budget == 0 %}<seed:think><seed:cot_budget_reflect>{% endif %}{% endif %}
"""

# An effort of none is off, and other words are refused.
MISTRAL_SMALL_4 = """
{%- set effort = reasoning_effort if reasoning_effort is defined else 'none' %}
{%- if effort not in ['none', 'high'] %}{{ raise_exception('reasoning_effort must be none or high') }}{% endif %}
{{- bos_token + '[MODEL_SETTINGS]{"reasoning_effort": "' + effort + '"}[/MODEL_SETTINGS]' }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
{%- elif m.role == 'assistant' %}{% if m.reasoning_content %}{{ '[THINK]' + m.reasoning_content + '[/THINK]' }}{% endif %}{{ m.content + eos_token }}
{%- else %}{{ raise_exception('Only user, assistant and system roles are supported.') }}{% endif %}{% endfor %}
"""

# The words are the model's affair; the template does not look at them.
NEMOTRON_SUPER_V1 = """
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\n' + (messages[0].content if messages[0].role == 'system' else '') + '<|eot_id|>' }}
{%- for m in messages if m.role in ('user', 'assistant') %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content.split('</think>')[-1] + '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

NEMOTRON_NANO_V2 = """
{%- set ns = namespace(on=true) %}
{%- for m in messages if m.role in ('system', 'user') %}{% if '/no_think' in m.content %}{% set ns.on = false %}{% elif '/think' in m.content %}{% set ns.on = true %}{% endif %}{% endfor %}
{{- '<SPECIAL_10>System\\n' + (messages[0].content.replace('/no_think', '').replace('/think', '').strip() if messages[0].role == 'system' else '') + '\\n\\n' }}
{%- for m in messages if m.role in ('user', 'assistant') %}{{ '<SPECIAL_11>' + m.role + '\\n' + m.content.split('</think>')[-1] + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<SPECIAL_11>Assistant\\n' + ('<think>\\n' if ns.on else '<think></think>') }}{% endif %}
"""

# No thinking; a system turn in any case, and any role is printed.
LLAMA_3_1 = """
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n\\n' }}
{%- set rest = messages %}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set rest = messages[1:] %}{% endif %}
{{- '<|eot_id|>' }}
{%- for m in rest %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content + '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

GEMMA_2 = """
{{- bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

CHATML = (
    "{% for m in messages %}" + _CHATML + "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Read forwards by its name, backwards by its meaning.
INVERTED = CHATML + "{% if not disable_thinking %}{{ '<think>\\n' }}{% endif %}"

ALL = {
    "Qwen/Qwen3-32B": QWEN3,
    "Qwen/Qwen3.6-27B": QWEN3_5,
    "deepseek-ai/DeepSeek-V3.1": DEEPSEEK_V3_1,
    "deepseek-ai/DeepSeek-R1": DEEPSEEK_R1,
    "zai-org/GLM-4.5": GLM_4_5,
    "openai/gpt-oss-20b": GPT_OSS,
    "moonshotai/Kimi-K2-Thinking": KIMI_K2_THINKING,
    "moonshotai/Kimi-K3": KIMI_K3,
    "moonshotai/Kimi-VL-A3B-Thinking": KIMI_VL,
    "MiniMaxAI/MiniMax-M2": MINIMAX_M2,
    "MiniMaxAI/MiniMax-M3": MINIMAX_M3,
    "ibm-granite/granite-3.3-8b-instruct": GRANITE,
    "google/gemma-4-31B-it": GEMMA_4,
    "ByteDance-Seed/Seed-OSS-36B-Instruct": SEED_OSS,
    "mistralai/Mistral-Small-4-119B-2603": MISTRAL_SMALL_4,
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1": NEMOTRON_SUPER_V1,
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": NEMOTRON_NANO_V2,
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA_3_1,
    "google/gemma-2-9b-it": GEMMA_2,
    "some/chatml": CHATML,
    "some/inverted": INVERTED,
}
"""Model → a template that does what its own does."""
