//! What the compiler says of programs that must not compile. `TRYBUILD=overwrite` writes the `.stderr` files anew.

#[test]
fn programs_that_do_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/cases/*.rs");
}
