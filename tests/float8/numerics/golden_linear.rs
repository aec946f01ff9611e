//! y, dx and dw of linear.safetensors, through `Float8<Autodiff<B>>` as in user code.
use burn_float8::backend::Float8Backend;
use kernel_tests::visit_golden_linears;
use test_data::Golden;

use crate::on_cpu_and_wgpu;

fn linears_on<B: Float8Backend>(runtime: &str, golden: &Golden) {
    let mut count = 0;
    visit_golden_linears::<B>(golden, &mut |case| {
        let name = case.name.clone();
        case.run().unwrap_or_else(|failure| panic!("{name} on {runtime}: {failure}"));
        count += 1;
    });
    assert!(count >= 3, "{count} recipes on {runtime}");
}

#[test]
fn golden_linear_on_every_runtime() {
    let golden = Golden::open("linear.safetensors");
    on_cpu_and_wgpu!(linears_on, &golden);
}
