"""Today's date in a chat template, replaced by a fixed one."""

import json
import re
from datetime import datetime

from trainkit.errors import DataError

STRFTIME = re.compile(r"strftime_now\(\s*([\"'])(.*?)\1\s*\)")


def freeze_dates(template: str, date: str) -> str:
    """Put a fixed date into a template that asks for today's.

    A macro of the same name hides transformers' ``strftime_now``; it knows the formats that the
    template asks for.

    Args:
        template: Jinja text.
        date: YYYY-MM-DD.

    Raises:
        DataError: it is not a date.
    """
    try:
        day = datetime.strptime(date, "%Y-%m-%d")
    except ValueError as error:
        raise DataError(
            f"{date!r} is not a date of the form YYYY-MM-DD", where="data.frozen_date"
        ) from error
    if "strftime_now" not in template:
        return template
    known = {form: day.strftime(form) for _, form in STRFTIME.findall(template)}
    answer = f"{{{{ {json.dumps(known)}.get(format, {json.dumps(date)}) }}}}"
    # The empty expression keeps Jinja from trimming the template's own first line break.
    return f'{{% macro strftime_now(format) -%}}{answer}{{%- endmacro %}}{{{{ "" }}}}{template}'
