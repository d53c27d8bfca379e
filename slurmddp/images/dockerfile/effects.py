"""Which options an instruction may have, and what has no effect under Apptainer, or another one."""

FLAGS = {
    "RUN": {"mount"},
    "COPY": {"from", "chown", "chmod", "link", "parents", "exclude"},
    "ADD": {"chown", "chmod", "link", "exclude", "checksum"},
    "HEALTHCHECK": {"interval", "timeout", "start-period", "start-interval", "retries"},
}
INSTEAD = {
    "network": "remove the option: a build uses the network of its machine",
    "security": "remove the option: a build has only the rights of its user",
}
#: What is converted and does not do what it does in Docker, by a pattern of the instruction.
TRAPS = {
    r"RUN .*\bpip[\d.]* (?:[^;&|]* )?install [^;&|]*--user\b": (
        "pip install --user puts packages into the build's ~/.local: they are not found when the image runs, "
        "so remove --user"
    ),
    r"RUN .*\b(chmod (-\S+ )*([ugoa]*\+[rwxXt]*s|[2-7][0-7]{3}\b)|setcap )|(COPY|ADD) .*--chmod=[2-7][0-7]{3}": (
        "setuid and setgid bits and capabilities of files have no effect under Apptainer: programs have the "
        "caller's rights"
    ),
    r"""WORKDIR ["']?/root\b|(COPY|ADD) .*[\s"]/root(/[^\s"]*)?["\]]*$|ENV .*[=:\s"']/root/""": (
        "/root has mode 700 in most images: users who run the image cannot read what is below it; use another folder, "
        "such as /opt"
    ),
}
NOTED = {
    "EXPOSE": "ports are the host's own under Apptainer: nothing to convert",
    "VOLUME": "Apptainer has no volumes: bind a folder of the host there when the image runs",
    "STOPSIGNAL": "Apptainer forwards the signals that it gets: nothing to convert",
    "ONBUILD": "stages of this Dockerfile run it; a .sif keeps no triggers for other images",
    "HEALTHCHECK": "Apptainer runs no health checks: nothing to convert",
}
