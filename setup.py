"Packaging: everything comes from settings.ini, so that nbdev and pip read one file."
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

ini = ConfigParser(delimiters=["="])
ini.read("settings.ini", encoding="utf-8")
cfg = ini["DEFAULT"]
lib = cfg["lib_name"]

setup(
    name=lib,
    version=cfg["version"],
    description=cfg["description"],
    keywords=cfg["keywords"].split(),
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    license="Apache-2.0",
    packages=find_packages(include=[lib, f"{lib}.*"]),
    package_data={lib: ["app/static/*", "kernels/*.c", "kernels/*.cu", "kernels/*.cuh"]},
    python_requires=">=" + cfg["min_python"],
    install_requires=cfg["requirements"].split(),
    extras_require={
        "dev": cfg["dev_requirements"].split(),
        "serve": cfg["serve_requirements"].split(),
        "grammar": cfg["grammar_requirements"].split(),
        "data": cfg["data_requirements"].split(),
        "track": cfg["track_requirements"].split(),
        "eval": cfg["eval_requirements"].split(),
    },
    entry_points={"nbdev": [f"{cfg['lib_path']}={cfg['lib_path']}._modidx:d"]},
    classifiers=[
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Framework :: Jupyter",
    ],
)
