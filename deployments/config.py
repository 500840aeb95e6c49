"""The one configuration tree and its one loader: flags, a YAML file and `serve deploy` all end in `AppConfig`.

Models hold the settings of `replica/config.py` under the names that the command line uses with dashes. Unknown names,
wrong types and values out of range raise `SettingError` with the path of the setting, its value and what is allowed.
"""

from __future__ import annotations
