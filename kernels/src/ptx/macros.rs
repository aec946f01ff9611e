//! Macro for functions that are one PTX statement each.

/// Defines functions whose body is a PTX statement, written as the arguments of `format!`:
///
/// ```text
/// ptx! {
///     /// Shifts a word.
///     pub(crate) fn shift(a: u32, by: u32, #[comptime] left: bool) -> u32 {
///         pure "{shift}.b32 {out}, {a}, {by};\n", shift = if left { "shl" } else { "shr" }
///     }
/// }
/// ```
///
/// In braces, `out` is the result, a run-time parameter its register, and a comptime parameter its
/// value. Run-time parameters are u32, u64 or f32. The statement is volatile and clobbers memory
/// ([`asm`](super::asm)) unless it is `pure` ([`pure_asm`](super::pure_asm)).
macro_rules! ptx {
    ($(
        $(#[doc = $doc:literal])*
        $vis:vis fn $name:ident($($(#[$comptime:ident])? $arg:ident: $ty:ident),*) $(-> $result:ident)? {
            $($pure:ident)? $template:literal $(, $word:ident = $choice:expr)*
        }
    )*) => {$(
        $(#[doc = $doc])*
        #[cube]
        $vis fn $name($($(#[$comptime])? $arg: $ty),*) $(-> $result)? {
            intrinsic!(|scope| {
                let (mut outputs, mut inputs) = (Vec::new(), Vec::new());
                $(
                    let result = scope.create_local_mut($result::as_type(scope));
                    outputs.push($crate::ptx::output(&result));
                )?
                $(let $word = $choice;)*
                $(ptx!(@operand scope outputs inputs $(#[$comptime])? $arg);)*
                let template = format!($template $(, out = ptx!(@if $result "%0"))?);
                ptx!(@statement $($pure)?)(scope, &template, &outputs, &inputs);
                $(ptx!(@if $result result.into()))?
            })
        }
    )*};
    (@operand $scope:ident $outputs:ident $inputs:ident #[comptime] $arg:ident) => {};
    (@operand $scope:ident $outputs:ident $inputs:ident $arg:ident) => {
        let place = format!("%{}", $outputs.len() + $inputs.len());
        $inputs.push($crate::ptx::input($scope, *$arg.expand));
        let $arg = place;
    };
    (@statement pure) => { $crate::ptx::pure_asm };
    (@statement) => { $crate::ptx::asm };
    // Expands only if there is a result. A repetition must name a variable of the pattern.
    (@if $condition:ident $($then:tt)*) => { $($then)* };
}
