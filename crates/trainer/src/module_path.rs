//! [`ModulePath`]: current path of a visitor or mapper in a module tree.

/// Stack of module names, for visitors and mappers.
#[derive(Debug, Default)]
pub struct ModulePath(Vec<String>);

impl ModulePath {
    /// Enters a module.
    pub fn enter(&mut self, name: &str) {
        self.0.push(name.to_string());
    }

    /// Leaves a module.
    pub fn exit(&mut self) {
        self.0.pop();
    }

    /// Names joined by dots: `layers.0.mlp.up_proj.weight`.
    pub fn dotted(&self) -> String {
        self.0.join(".")
    }
}
