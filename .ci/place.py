"""Write the address of the repository where a package index shows it.

    python .ci/place.py https://example.org/owner/tdcollect FOLDER

In FOLDER, a clone, pyproject.toml gets the project's links, and the relative links of README.md
become links to the files of the version's tag. The repository itself holds no address of its own.
"""

import re
import sys
import tomllib
from pathlib import Path

repository, folder = sys.argv[1].rstrip("/"), Path(sys.argv[2])
project = folder / "pyproject.toml"
text = project.read_text()
tag = f"v{tomllib.loads(text)['project']['version']}"
links = {
    "Repository": repository,
    "Documentation": f"{repository}/blob/{tag}/docs/index.md",
    "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
    "Issues": f"{repository}/issues",
}
table = "".join(f'{name} = "{url}"\n' for name, url in links.items())
project.write_text(text.replace("[project.scripts]", f"[project.urls]\n{table}\n[project.scripts]"))
readme = folder / "README.md"
relative = r"\]\((?![a-z]+:|#)"
readme.write_text(re.sub(relative, f"]({repository}/blob/{tag}/", readme.read_text()))
