"""Controllers: one actor for a name, for the program and for actors."""

from __future__ import annotations

from tests.conformance.actors import Owner, Worker
from tests.conformance.cases import Kit


def a_controller_is_one_for_all(kit: Kit) -> None:
    first, second = kit.one(Owner), kit.one(Owner)
    before = first.controller_value.call_one(0).get()
    assert first.controller_value.call_one(1).get() == before + 1
    assert second.controller_value.call_one(1).get() == before + 2


def the_program_gets_a_controller(kit: Kit) -> None:
    counter = kit.api.get_or_spawn_controller("conformance_program", Worker).get()
    again = kit.api.get_or_spawn_controller("conformance_program", Worker).get()
    value = counter.add.call_one(1).get()
    assert again.add.call_one(1).get() == value + 1


def other_names_are_other_controllers(kit: Kit) -> None:
    first = kit.api.get_or_spawn_controller("conformance_first", Worker).get()
    second = kit.api.get_or_spawn_controller("conformance_second", Worker, 100).get()
    assert (first.add.call_one(1).get(), second.add.call_one(1).get()) == (1, 101)


def the_arguments_of_the_first_call_count(kit: Kit) -> None:
    kit.api.get_or_spawn_controller("conformance_arguments", Worker, 10, step=2).get()
    again = kit.api.get_or_spawn_controller("conformance_arguments", Worker, 50).get()
    assert again.add.call_one(1).get() == 12


def a_controller_can_be_passed_to_actors(kit: Kit) -> None:
    controller = kit.api.get_or_spawn_controller("conformance_passed", Worker).get()
    assert kit.one(Owner).call.call_one(controller, "hello").get() == ["hello"]


def the_program_and_its_actors_share_a_controller(kit: Kit) -> None:
    value = kit.one(Owner).controller_value.call_one(1).get()
    controller = kit.api.get_or_spawn_controller("conformance_counter", Worker).get()
    assert controller.add.call_one(0).get() == value
