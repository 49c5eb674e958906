//! Pages of what a configuration can name.

use blkmq_core::sched::Registry;

#[test]
fn elevator_has_a_page_of_its_name() {
    for elevator in Registry::default().iter() {
        let pages = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/schedulers");
        let page = std::fs::read_to_string(format!("{pages}/{elevator}.md"));
        assert!(page.is_ok_and(|page| page.contains(elevator.name)), "{elevator}");
    }
}
