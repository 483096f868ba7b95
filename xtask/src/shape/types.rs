//! Fields and methods of types.
//!
//! Methods of all `impl` blocks in the crate count, including traits. A free function counts for
//! each type that it takes by `&mut`, and for its first argument by `&`.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::Visit;
use syn::{FnArg, GenericArgument, PathArguments, Type};

use super::Source;

const MOST_FIELDS: usize = 25;
const MOST_METHODS: usize = 70;

/// Layouts fixed by a specification or shared memory.
const LAYOUTS: &[&str] = &[
    "ControllerState",
    "IdentifyController",
    "IdentifyNamespace",
    "LabelBlock",
];

struct Size {
    module: Vec<String>,
    place: String,
    fields: usize,
    methods: usize,
}

/// Types by name; a name may have several.
type Types = BTreeMap<String, Vec<Size>>;

/// Prints the number of oversized types; returns them.
pub(super) fn check(sources: &[Source]) -> Vec<String> {
    let packages: BTreeSet<&str> = sources.iter().map(|source| &*source.package).collect();
    let mut beyond = Vec::new();
    for package in packages {
        let files: Vec<&Source> = sources
            .iter()
            .filter(|source| source.package == package)
            .collect();
        for (name, sizes) in measure(&files) {
            for size in sizes {
                let is_large = size.fields > MOST_FIELDS || size.methods > MOST_METHODS;
                if is_large && !LAYOUTS.contains(&name.as_str()) {
                    beyond.push(format!(
                        "{}: {name} has {} fields, {} methods",
                        size.place, size.fields, size.methods
                    ));
                }
            }
        }
    }
    let limit = format!("{MOST_FIELDS} fields or {MOST_METHODS} methods");
    super::print("types", beyond.len(), &limit);
    beyond
}

fn measure(files: &[&Source]) -> Types {
    let mut types = Types::new();
    for source in files {
        let mut define = Define {
            source,
            types: &mut types,
        };
        for item in &source.items {
            define.visit_item(item);
        }
    }
    for source in files {
        let mut count = Count {
            source,
            types: &mut types,
        };
        for item in &source.items {
            count.visit_item(item);
        }
    }
    types
}

struct Define<'a> {
    source: &'a Source,
    types: &'a mut Types,
}

impl Define<'_> {
    fn note(&mut self, name: &syn::Ident, fields: usize) {
        let size = Size {
            module: self.source.module.clone(),
            place: self.source.at(name.span().start().line),
            fields,
            methods: 0,
        };
        self.types.entry(name.to_string()).or_default().push(size);
    }
}

impl<'ast> Visit<'ast> for Define<'_> {
    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.note(&item.ident, item.fields.len());
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.note(&item.ident, 0);
    }
}

struct Count<'a> {
    source: &'a Source,
    types: &'a mut Types,
}

impl Count<'_> {
    /// Adds methods to the nearest type of that name.
    fn add(&mut self, name: &str, methods: usize) {
        let own = &self.source.module;
        let common = |size: &Size| {
            own.iter()
                .zip(&size.module)
                .take_while(|(a, b)| a == b)
                .count()
        };
        let types = self.types.get_mut(name).into_iter().flatten();
        if let Some(size) = types.max_by_key(|size| common(size)) {
            size.methods += methods;
        }
    }
}

impl<'ast> Visit<'ast> for Count<'_> {
    fn visit_item_impl(&mut self, block: &'ast syn::ItemImpl) {
        let is_method = |item: &&syn::ImplItem| matches!(item, syn::ImplItem::Fn(_));
        let methods = block.items.iter().filter(is_method).count();
        if let Some(name) = name_of(&block.self_ty) {
            self.add(&name, methods);
        }
    }

    fn visit_item_fn(&mut self, function: &'ast syn::ItemFn) {
        let mut taken = BTreeSet::new();
        for (index, argument) in function.sig.inputs.iter().enumerate() {
            let FnArg::Typed(argument) = argument else {
                continue;
            };
            if let Type::Reference(reference) = &*argument.ty
                && (reference.mutability.is_some() || index == 0)
            {
                taken.extend(name_of(&reference.elem));
            }
        }
        for name in taken {
            self.add(&name, 1);
        }
    }
}

/// A type's name, or the name inside an `Rc`.
fn name_of(of: &Type) -> Option<String> {
    let Type::Path(path) = of else {
        return None;
    };
    let last = path.path.segments.last()?;
    if last.ident == "Rc"
        && let PathArguments::AngleBracketed(arguments) = &last.arguments
        && let Some(GenericArgument::Type(inner)) = arguments.args.first()
    {
        return name_of(inner);
    }
    Some(last.ident.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::source;

    #[test]
    fn methods_count_wherever_they_are() {
        let file = |module: &str, text: &str| Source {
            package: "crate".to_owned(),
            path: module.into(),
            module: vec![module.to_owned()],
            items: source::parse(text).unwrap(),
        };
        let files = [
            file(
                "a",
                "struct T { x: u8, y: u8 } impl T { fn f(&self) {} #[cfg(test)] fn g() {} }",
            ),
            file(
                "b",
                "impl Drop for T { fn drop(&mut self) {} } fn free(n: u8, t: &mut T) {}",
            ),
            file(
                "c",
                "struct T; impl T { fn other(&self) {} } fn read(t: &Rc<T>) {}",
            ),
        ];
        let types = measure(&files.iter().collect::<Vec<_>>());
        let sizes: Vec<_> = types["T"].iter().map(|t| (t.fields, t.methods)).collect();
        // `b` defines none, so its methods count for the last type equally near.
        assert_eq!(sizes, [(2, 1), (0, 4)]);
    }
}
