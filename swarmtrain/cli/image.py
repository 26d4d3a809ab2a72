"""`swarmtrain image`: the Docker image of the nodes."""

from pathlib import Path
from typing import Annotated

import typer

from swarmtrain.cli.options import JsonOption, YesOption

app = typer.Typer(no_args_is_help=True)
registry = typer.Typer(no_args_is_help=True)
app.add_typer(registry, name="registry", help="Run a Docker registry in the swarm, if you have none.")

_ENGINE_TIMEOUT_SECONDS = 1800.0  # seconds without progress from the engine in one step: it may be unpacking gigabytes


@app.command("build")
def build_image(
    tag: Annotated[str, typer.Option("--tag", "-t", help="Image tag, such as registry.lab:5000/swarmtrain:0.1.")],
    context: Annotated[
        Path, typer.Argument(help="Directory of your script. A Dockerfile or requirements there take precedence over swarmtrain's.")
    ] = Path(),
    base_image: Annotated[
        str | None,
        typer.Option(
            "--base", help="Base image with Python 3.11. Default: Python's official one, with a C++ compiler if torch supports GPUs."
        ),
    ] = None,
    push: Annotated[bool, typer.Option("--push", help="Push the image to the registry in the tag.")] = False,
    json: JsonOption = False,
) -> None:
    """Build the Docker image; print its tag. Works offline once the wheels are downloaded."""
    from swarmtrain import images
    from swarmtrain.launchers.common.docker_engine import DockerEngine
    from swarmtrain.view.console import show_progress
    from swarmtrain.view.output import print_image

    engine = DockerEngine(timeout=_ENGINE_TIMEOUT_SECONDS)
    with show_progress(f"building {tag}") as report_progress:
        images.build_image(engine.client, context, tag, base_image=base_image, report_progress=report_progress)
        if push:
            images.push_image(engine.client, tag, report_progress=report_progress)
    print_image(tag, as_json=json)


@app.command("add")
def add_code_layer(
    code_folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Directories to add; a .dockerignore in them is respected.")],
    base_image: Annotated[str, typer.Option("--to", metavar="IMAGE", help="Image to add the directories to.")],
    tag: Annotated[str, typer.Option("--tag", "-t", help="Tag of the new image.")],
    push: Annotated[bool, typer.Option("--push", help="Push the image to the registry in the tag.")] = False,
    json: JsonOption = False,
) -> None:
    """Add each directory to an image as a separate layer, next to the script; print the tag. Only the new layers are pushed."""
    from swarmtrain import images
    from swarmtrain.launchers.common.docker_engine import DockerEngine
    from swarmtrain.view.console import show_progress
    from swarmtrain.view.output import print_image

    engine = DockerEngine(timeout=_ENGINE_TIMEOUT_SECONDS)
    with show_progress(f"building {tag}") as report_progress:
        images.add_code_layer(engine.client, code_folders, base_image, tag, working_folder=Path.cwd(), report_progress=report_progress)
        if push:
            images.push_image(engine.client, tag, report_progress=report_progress)
    print_image(tag, as_json=json)


@app.command("lock")
def lock_packages(folder: Annotated[Path, typer.Argument(help="Folder with requirements/image.txt.")] = Path()) -> None:
    """Regenerate requirements/image.lock, the hashes of image.txt's pinned packages for all CPU architectures; print its path."""
    from swarmtrain.images.lock_file import write_lock_file
    from swarmtrain.view.console import show_progress

    with show_progress("locking requirements/image.txt") as report_progress:
        typer.echo(write_lock_file(folder, report_progress=report_progress))


@app.command("push")
def push_image(tag: Annotated[str, typer.Argument(help="Tag of an image in the local engine.")], json: JsonOption = False) -> None:
    """Push an image to the registry in its tag; print the pinned reference (digest)."""
    from swarmtrain import images
    from swarmtrain.launchers.common.docker_engine import DockerEngine
    from swarmtrain.view.console import show_progress
    from swarmtrain.view.output import print_image

    engine = DockerEngine(timeout=_ENGINE_TIMEOUT_SECONDS)
    with show_progress(f"pushing {tag}") as report_progress:
        images.push_image(engine.client, tag, report_progress=report_progress)
    print_image(images.pin_image(engine, tag).reference, as_json=json)


@app.command("distribute")
def distribute_image(
    image: Annotated[str, typer.Argument(help="Tag of an image in the local engine.")],
    engine_addresses: Annotated[
        list[str],
        typer.Option("--to", metavar="ADDRESS", help="Target engine, such as ssh://gpu-2. Repeatable. Default: all nodes, over SSH."),
    ] = [],  # noqa: B006  # Typer's convention for lists
    *,
    json: JsonOption = False,
) -> None:
    """Copy an image to every node without a registry; print the tag to use in a config."""
    from swarmtrain import images
    from swarmtrain.images.swarm_nodes import list_other_engines
    from swarmtrain.launchers.common.docker_engine import DockerEngine
    from swarmtrain.view.console import show_progress
    from swarmtrain.view.output import print_image

    engine = DockerEngine(timeout=_ENGINE_TIMEOUT_SECONDS)
    with show_progress(f"distributing {image}") as report_progress:
        targets = {address: address for address in engine_addresses} or list_other_engines(engine)
        tag = images.distribute_image(
            engine.client,
            image,
            targets,
            lambda address: DockerEngine(address, timeout=_ENGINE_TIMEOUT_SECONDS).client,
            report_progress=report_progress,
        )
    print_image(tag, as_json=json)


@registry.command("up")
def start_registry(
    node: Annotated[
        str | None, typer.Option("--node", help="Node to run the registry on. Default: the local engine's node.", show_default=False)
    ] = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port of the registry on that node.")] = 5000,
    image: Annotated[str, typer.Option("--image", help="Registry image.")] = "registry:2.8.3",
    user: Annotated[str, typer.Option("--user", help="User of the registry's login.")] = "swarmtrain",
    password_file: Annotated[
        Path | None,
        typer.Option("--password-file", help="File with the password. Default: random, stored in the state directory.", show_default=False),
    ] = None,
    *,
    no_login: Annotated[bool, typer.Option("--no-login", help="Require no login: anyone who reaches the port can replace images.")] = False,
    allow_deletes: Annotated[bool, typer.Option("--allow-deletes", help="Accept requests that delete images.")] = False,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Start a registry on one node, with a login; print its address (the prefix of image names) and the engine settings that it needs."""
    from swarmtrain.operations import registry as registries
    from swarmtrain.view.console import print_message
    from swarmtrain.view.output import print_result

    login_user = "" if no_login else user
    registry_status = registries.start_registry(
        node=node, port=port, image=image, user=login_user, password_file=password_file, allow_deletes=allow_deletes, assume_yes=yes
    )
    if json:
        print_result(registry_status, as_json=True)
    else:
        print_message(str(registry_status))
        typer.echo(registry_status.address)


@registry.command("down")
def remove_registry(
    remove_images: Annotated[
        bool, typer.Option("--volume", help="Also remove its images. Without it they are available after the next up.")
    ] = False,
) -> None:
    """Stop the registry; keep its images unless --volume is set."""
    from swarmtrain.images import swarm_registry as registries
    from swarmtrain.launchers.common.docker_engine import DockerEngine
    from swarmtrain.view.console import show_progress

    with show_progress("stopping the registry") as report_progress:
        registries.remove_registry(DockerEngine(), remove_images=remove_images, report_progress=report_progress)


@registry.command("status")
def show_registry_status(json: JsonOption = False) -> None:
    """Show the registry's status, and whether the engine can use it."""
    from swarmtrain.images import swarm_registry as registries
    from swarmtrain.launchers.common.docker_engine import DockerEngine
    from swarmtrain.view.output import print_result

    print_result(registries.get_registry_status(DockerEngine()), as_json=json)
